"""Bytes of activations: what a pack's forward pass keeps for its backward pass, on the device and in host memory.

For each token or patch, in a layer of width D, with H heads and K heads of keys and values, each d wide, an MLP of
width F and a computing type of c bytes. Trained: t = 1, otherwise 0. Of layers that are recomputed (the first ones of
the encoder and of the language model) c D are kept, and the following only for one layer at a time. Adapters (LoRA)
keep the inputs of their layers as trained weights do, and nothing of norms:

    norms          2 D (4 + 2 c t)       fp32 input; its normalised form and the output, for gradients of weights;
                   layer norms 2 D c (1 + t): input and output; norms of queries and keys (H d + K d)
                   (4 + c t)
    attention      2 c H d + 2 c K d + 4 H     queries, output, keys and values, log-sum-exp;
                   an encoder block also 2 c D (q and k before rotation)
    MLP            c F (3 + t); without a gate c F (1 + t)

The first ceil(share x L) of the L layers of the encoder, and likewise of the language model, keep their activations in
host memory. In the backward pass the activations of at least LEAST_LAYERS layers are on the device.
"""

from __future__ import annotations

from dataclasses import replace

from dhp_ray.planner.layer_share import num_relieved
from dhp_ray.planner.memory_terms import COMPUTE_BYTES, MemorySettings, PackLoad
from dhp_ray.planner.model_shape import LayerShape, ModelShape


class ActivationMemory:
    """The formulas above for a model and the settings of a run."""

    def __init__(self, shape: ModelShape, settings: MemorySettings) -> None:
        self.shape, self.settings = shape, settings
        self._c = COMPUTE_BYTES[settings.precision]
        self._trains = {part: settings.trains(part) for part in ("vision", "language")}
        self._trains_weights = {part: settings.trains_weights(part) for part in ("vision", "language")}

    def layer_bytes(self, part: str, layer: LayerShape) -> int:
        """Bytes that a layer keeps for each token (or patch) for its backward pass."""
        c = self._c
        queries, key_values = layer.heads * layer.head_width, layer.key_value_heads * layer.head_width
        own = 2 * c * layer.width if part == "vision" else 0
        if layer.query_key_norms:  # and a number for each head, which is normed separately
            own += ((queries + key_values) * (4 + c * self._trains_weights[part])
                    + 4 * (layer.heads + layer.key_value_heads))
        return (2 * layer.width * self._norm(part, layer) + 2 * c * (queries + key_values) + 4 * layer.heads + own
                + layer.mlp_width * self._mlp(part, layer))

    def moved_bytes(self, load: PackLoad) -> float:
        """The most bytes of a pack's activations that are in host memory at a time."""
        moved = 0.0
        for part, positions in (("language", load.tokens), ("vision", load.patches)):
            # those of the language model are kept if anything before the loss is trained
            if self._trains["vision"] or (self._trains["language"] and part == "language"):
                count = self._num_layers(part)
                moved += positions * self._of_layers(part, load) * num_relieved(load.offload, count) / max(1, count)
        return moved

    def _num_layers(self, part: str) -> int:
        return sum(layer.count for layer in (self.shape.vision if part == "vision" else self.shape.language))

    def _recomputed(self, load: PackLoad) -> float:
        """The share of layers that are recomputed."""
        return 1.0 if self.settings.recomputes else load.recomputed

    def _of_layers(self, part: str, load: PackLoad) -> float:
        """Bytes that all layers of a part keep for each token (or patch)."""
        share = self._recomputed(load)
        return sum(layer.count * (share * self._c * layer.width + (1 - share) * self.layer_bytes(part, layer))
                   for layer in (self.shape.vision if part == "vision" else self.shape.language))

    def _again(self, part: str, load: PackLoad) -> float:
        """The share of a layer's bytes that is there again during the backward pass of the last layer that is
        recomputed, beyond what layers kept at the end of the forward pass: 0 if the last layer is kept, whose backward
        pass is over by then. Between that and all layers: what makes this and the unrounded shares a line.
        """
        return max(0.0, 1 - (1 - self._recomputed(load)) * self._num_layers(part))

    def _kept(self, part: str, load: PackLoad, least: int = 0) -> float:
        """Bytes that the layers of a part, with their rotations and mergers, keep on the device until their backward
        pass, or during it, when at least `least` layers are there. The share of layers is used unrounded: rounding up
        moves more of them, never less.
        """
        shape, c, positions = self.shape, self._c, load.patches if part == "vision" else load.tokens
        layers = shape.vision if part == "vision" else shape.language
        here = max(1 - load.offload, min(1.0, least / max(1, self._num_layers(part))))
        of_layers = self._of_layers(part, load) * here
        if part == "language":
            return positions * (of_layers + 2 * c * layers[0].head_width)  # cosines and sines
        return positions * (of_layers + 8 * layers[0].head_width + self._merger_bytes())  # fp32 cosines and sines

    def _merger_bytes(self) -> float:
        """Bytes that the mergers keep for each patch: their norms, their first products and their activations."""
        shape = self.shape
        width, levels = shape.vision[0].width, shape.feature_levels
        # a projector after the encoder has a layer norm, whatever the encoder's norms are
        norm = self._norm("vision", replace(shape.vision[0], layer_norms=True) if shape.vision_projector
                          else shape.vision[0]) * width
        shared = self._c * width * (levels - 1)  # a layer norm's input, which the next block keeps too
        return levels * (norm + 2 * self._c * shape.merger_width / shape.merge_area) - shared

    def _norm(self, part: str, layer: LayerShape) -> int:
        """Bytes that a norm of a layer's kind keeps for each value of its input."""
        if layer.layer_norms:
            return self._c * (1 + self._trains[part])
        return 4 + self._c * (self._trains[part] + self._trains_weights[part])

    def _mlp(self, part: str, layer: LayerShape) -> int:
        """Bytes that an MLP keeps for each value of its width."""
        return self._c * ((3 if layer.gated else 1) + self._trains[part])
