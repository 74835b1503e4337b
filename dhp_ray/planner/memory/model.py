"""Bytes that a rank needs to train a model: what it always holds, and what a pack adds at each moment of its pass.

What a rank always holds (`resident`), with P parameters, T of them trained, N ranks, c bytes of the computing type:

    sync         parameters   gradients        state, two versions of values and both moments
    step         c P          4 T + 4 T / N    24 T / N       (N = 1: gradients 4 T)
    micro_batch  4 T / N + c (P - T) / N       4 T / N       24 T / N

A pack's pass is a sequence of moments; the one that needs most decides. During all of them the activations for the
backward pass are held. In addition to these, at single moments, for layers of width D and an MLP of F:

    loss           4 V D, gradient of the head summed in fp32; logits of a chunk; gradients of several chunks' logits
    loss, backward (4 + c) V D, gradient of the head, and cast; in fp32 4 V D
    last norm      (2 c + 16) D, gradients in the computing type and in fp32
    layer          gradients in its MLP, c F (3 - t), or c F and, once, that of its last product's weights, c D F; or in
                   its attention, with the kernel's workspace; in its experts the k rows of each token, wide (k c D)
                   and narrow (k c F), and the gradients of all experts' weights; where E ranks share them: CAPACITY
                   times as many rows, the gradients of an E-th, and the tokens of E ranks (E c D), twice
    embedding      gradient of the embedding; of a tied one c V D since the loss, and the two added: 3 c V D;
                   sync=micro_batch: the encoder's last unit, gathered for what follows
    reduction      sync=micro_batch: the root's gradients, c R, and those in transit, 4 R; the rest of the encoder with
                   its gradients
    gathered       sync=micro_batch: the root's parameters, always, c R; a head's of its own, c V D, from the last
                   layer's forward pass to its backward pass; a layer's and those of the next one; the gradients of one
                   unit in transit (4 bytes)

A pack's forward pass keeps the following for its backward pass, on the device and in host memory. For each token or
patch, in a layer of width D, with H heads and K heads of keys and values, each d wide, an MLP of width F and a
computing type of c bytes. Trained: t = 1, otherwise 0. Of layers that are recomputed (the first ones of the encoder and
of the language model) c D are kept (with `keeps_attention` c H d + 4 H more, never in host memory), and the following
only for one layer at a time. Adapters (LoRA) keep the inputs of their layers as trained weights do, none of norms:

    norms          2 D (4 + 2 c t)       fp32 input; its normalised form and the output, for gradients of weights (with
                   four norms 4 D); layer norms 2 D c (1 + t): input and output; norms of queries and keys
                   (H d + K d) (4 + c t); norms that multiply with 1 + weight keep their normalised form in fp32
    attention      2 c H d + 2 c K d + 4 H     queries, output, keys and values, log-sum-exp; in a sliding window also
                   received keys and values, 2 c K d a token looked back on;
                   an encoder block also 2 c D (q and k before rotation)
    MLP            c F (3 + t); without a gate c F (1 + t)
    gated delta    in place of attention, H states of K keys x V values, C channels convolved:
      net          3 c C + (4 + c) H + (12 + 3 c) H V for chunks that are full, beside states (`_beside_tokens`): the
                   chunks are computed again, one run at a time; gated attention: 2 c H d more of it
    experts        E of width F, of which a token takes k: k (c F (2 + t) + c D t + ROUTED_BYTES) + 4 E, with t = 0
                   unless the weights or adapters of experts are trained, which keep 2 c k of their rank; a layer that
                   is recomputed keeps 8 k in addition to c D; a shared expert of width S keeps c S (3 + t), and
                   c (D + 1) for its gate (`experts.py`)

The first ceil(share x L) of the L layers of the encoder, and likewise of the language model, keep their activations in
host memory. In the backward pass the activations of at least LEAST_LAYERS layers are on the device.

The terms describe model/, train/ and transformers' layers; tests/planner/test_memory.py traces their passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dhp_ray.planner.memory.experts import ExpertBytes, Moments
from dhp_ray.planner.memory.model_shape import LayerShape, ModelShape
from dhp_ray.planner.memory.workspace import workspace_bytes
from dhp_ray.planner.plan.cluster import LEAST_LAYERS, num_relieved

COMPUTE_BYTES = {"fp32": 4, "bf16": 2}
SLICE_BYTES = 64 * 2**20  # a rank's slice of the gradients (fp32) that one collective of sync=step reduces

Terms = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Settings of a run that affect its memory.

    precision: fp32 or bf16. frozen: parts that are not trained. device: whose attention kernel runs (cpu, cuda, npu).
    largest_image: vision tokens of the largest image or piece of a video, which one rank encodes. image_limit: the
    run's limit for one image (default: the pack's tokens). adapters: parameters of the adapters (LoRA) of each part
    that has some, which are then trained instead of the weights; those of "experts" apart from "language". drops: their
    inputs have dropout. expert_parallel: how many ranks share a layer's experts. keeps_attention: layers that are
    recomputed keep the results of attention.
    """

    sync: str
    world_size: int
    precision: str
    recomputes: bool
    frozen: tuple[str, ...] = ()
    device: str = "cuda"
    mirror_every_steps: str = "0"
    largest_image: int = 4096
    image_limit: int | None = None
    communicators_bytes: int = 0  # of all process groups
    adapters: Mapping[str, int] = field(default_factory=dict)
    drops: bool = False
    expert_parallel: int = 1
    keeps_attention: bool = False

    def trains(self, part: str) -> bool:
        """Whether anything in a part is trained, weights or adapters."""
        return part in self.adapters if self.adapters else part not in self.frozen

    def trains_weights(self, part: str) -> bool:
        return not self.adapters and part not in self.frozen

    def num_parameters(self, shape: ModelShape) -> int:
        return shape.num_parameters() + sum(self.adapters.values())

    def num_trained(self, shape: ModelShape) -> int:
        return sum(self.adapters.values()) if self.adapters else shape.num_parameters(without=self.frozen)


class PackLoad(NamedTuple):
    """One rank's part of a pack: its tokens, those of images and those with a label; the patches that it encodes; how
    many sequences attention separates; how many ranks share the pack; and the shares of its layers whose activations go
    to host memory, and that are recomputed (all of them with `MemorySettings.recomputes`)."""

    tokens: int
    vision_tokens: int = 0
    valid_tokens: int = 0
    patches: int = 0
    sequences: int = 1
    degree: int = 1
    offload: float = 0.0
    recomputed: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes of each term on a device: always held, and added by a pack at its highest `moment`."""

    resident: Terms
    moment: str
    pack: Terms

    @property
    def device_bytes(self) -> float:
        return sum(self.resident.values()) + sum(self.pack.values())


LOGITS_HELD = 1 << 25  # logits of a chunk: CHUNK_ELEMENTS of model/loss.py
CHUNKS_HELD = 8  # whose logits' gradients are held: CHUNKS_PER_PRODUCT of model/loss.py
SHORTEST_MEAN = 32  # least mean tokens of a pack's sequences; each sequence adds 128 rows to a kernel's workspace
SMALLEST_IMAGE = 64  # least mean patches of an image; each image adds rows to a kernel's workspace as well
STATE_CHUNK = 64  # tokens of a sequence that a gated delta net computes together
RUN_CHUNKS = 16  # chunks that its backward pass computes again together, at most
RUN_STEPS = 4  # of one piece of a sequence at least, if it has as many: states are kept where they begin
INPUT_BYTES = 48  # of a token: id, label, three positions, its place among the valid ones, int64 each


class MemoryModel:
    """The formulas above for a model and the settings of a run."""

    def __init__(self, shape: ModelShape, settings: MemorySettings) -> None:
        self.shape, self.settings = shape, settings
        self._c = COMPUTE_BYTES[settings.precision]
        self._trains = {part: settings.trains(part) for part in ("vision", "language")}
        self._trains_weights = {part: settings.trains_weights(part) for part in ("vision", "language")}
        self._trains_experts = self._trains_weights["language"] or "experts" in settings.adapters
        self._sharded = settings.sync == "micro_batch"
        self._root = shape.units()[-1].num_parameters
        self._adapters_of_experts = settings.adapters.get("experts", 0) / (
            sum(layer.count for layer in shape.language if layer.experts) or 1)  # of a layer

    def resident(self) -> Terms:
        """Device memory that a rank holds between steps."""
        size, ranks = self.settings.num_parameters(self.shape), self.settings.world_size
        trained = self.settings.num_trained(self.shape)
        share = math.ceil(trained / ranks)
        if self._sharded:
            parameters, gradients = 4 * share + self._c * math.ceil((size - trained) / ranks), 4 * share
        else:
            parameters, gradients = self._c * size, 4 * trained + (4 * share if ranks > 1 else 0)
        return {"parameters": parameters, "gradients": gradients, "state, version in force": 12 * share,
                "state, version before": 12 * share, "communicators": self.settings.communicators_bytes}

    def worst_load(self, tokens: int, offload: float = 0.0, recomputed: float = 0.0) -> PackLoad:
        """The pack that needs most memory with this many tokens a rank: only vision tokens, all with labels. `offload`
        and `recomputed`: shares of its layers.

        Images are dealt out whole, each to the member that ends first with it, so the fullest member has at most one
        image more than the mean.
        """
        # a ring's buffers are as large for two ranks as for more; states, and what windows look back on, are of all
        grows = any(layer.state_heads or layer.window for layer in self.shape.language)
        most = self.settings.world_size if grows else 2
        degree = min(most, self.settings.world_size)
        text = PackLoad(tokens, 0, tokens, 0, tokens // SHORTEST_MEAN + 1, degree, offload, recomputed)
        if not self.shape.vision:
            return text
        more = min(self.settings.image_limit or tokens, self.settings.largest_image) * (degree > 1)
        return text._replace(vision_tokens=tokens, patches=(tokens + more) * self.shape.merge_area)

    def memory(self, load: PackLoad) -> Memory:
        """What a rank needs while it runs this part of a pack."""
        moment, terms = max(self.moments(load).items(), key=lambda item: sum(item[1].values()))
        return Memory(self.resident(), moment, terms)

    def tokens_that_fit(self, memory_bytes: float, offload: float = 0.0, recomputed: float = 0.0) -> int:
        """Tokens of a pack that a device of `memory_bytes` holds in addition to the resident state, if these shares of
        its layers are moved and recomputed; 0 if not even one fits.
        """
        low, high = 0, 1
        while self.fits(memory_bytes, high, offload, recomputed) and high < 2**40:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(memory_bytes, middle, offload, recomputed) else (low, middle)
        return low

    def with_image_limit(self, memory_bytes: float, largest: int, offload: float = 0.0, tokens: int = 0) -> MemoryModel:
        """A model that has no limit for an image yet, with the one that devices of `memory_bytes` allow: `largest`, if
        with room for such an image a rank still holds `tokens` of a pack (0: its share of a sequence with it);
        otherwise as many tokens as a rank holds.
        """
        found = MemoryModel(self.shape, replace(self.settings, image_limit=largest))
        if found.fits(memory_bytes, tokens or math.ceil(largest / self.settings.world_size), offload):
            return found
        tokens = tokens or max(1, self.tokens_that_fit(memory_bytes, offload))
        return MemoryModel(self.shape, replace(self.settings, image_limit=tokens))

    def fits(self, memory_bytes: float, tokens: int, offload: float = 0.0, recomputed: float = 0.0) -> bool:
        """Whether a device of `memory_bytes` holds any pack of this many tokens a rank."""
        return self.memory(self.worst_load(tokens, offload, recomputed)).device_bytes <= memory_bytes

    def moments(self, load: PackLoad) -> dict[str, Terms]:
        """The terms of each moment of the pass, without the resident ones."""
        shape, c = self.shape, self._c
        trains_vision = self._trains["vision"] and load.patches > 0
        # the language model's activations are kept if anything before the loss is trained
        keeps = self._trains["language"] or self._trains["vision"]
        # of this pack and of the next one, which is copied ahead and at most as large
        inputs = 2 * (c * shape.patch_dim * load.patches + INPUT_BYTES * load.tokens)
        vision = self._kept("vision", load) if trains_vision else 0.0
        features = c * shape.width * shape.feature_levels * load.vision_tokens
        language, in_backward = (self._kept("language", load, least) if keeps else 0.0 for least in (0, LEAST_LAYERS))
        held = {"inputs": inputs, "activations, vision": vision + features, "activations, language": language}
        embedding = c * shape.embedding_parameters if self._trains_weights["language"] else 0
        root = {"gathered: embedding": float(c * self._root)} if self._sharded else {}
        own_head = shape.embedding_parameters if self._sharded and not shape.tied else 0  # that is gathered separately
        head = {"gathered: head": float(c * own_head)}
        # a tied head's gradient, which autograd keeps until the embedding's is there; or that of a head of its own, in
        # transit until the last layer's is
        since_loss = embedding if shape.tied else 4 * own_head if embedding else 0
        chunk, vocabulary = max(1, LOGITS_HELD // shape.vocabulary_size), shape.vocabulary_size
        slopes = c * min(load.valid_tokens, chunk * (CHUNKS_HELD if embedding else 1)) * vocabulary
        # in fp32 and, if it differs, in the computing type; or a part of the gradient before it is added
        logits = (4 + (c if c < 4 else 0)) * min(load.valid_tokens, chunk) * vocabulary
        added = min(embedding, c * LOGITS_HELD) if c < 4 else 0
        rows = held | root | head | {
            "last norm": self._norm("language", shape.language[0]) * shape.width * load.tokens,
            "rows of the loss": 2 * c * shape.width * load.valid_tokens}
        # since its forward, or for its backward
        last = {"gathered: a layer": c * self.units("language", shape.language[-1])[0] * self._sharded}
        found = {
            "loss": rows | ({} if own_head else last) | {
                "logits": slopes + max(logits, added), "gradient of the head": 4 * embedding / c},
            "loss, backward": rows | last | {"gradient of the head": (4 if c == 4 else 4 + c) * embedding / c}}
        if own_head:
            found["gathering of the head"] = rows | last | {"gathered: head": 2.0 * c * own_head, "rows of the loss": 0}
        held = held | {"activations, language": in_backward}
        if keeps:
            found["last norm, backward"] = held | root | last | {
                "last norm": rows["last norm"], "gradient of the head": since_loss,
                "gradients in the norm": (2 * c + 16) * shape.width * load.tokens}
            for layer in shape.language:
                if layer.experts:  # in the forward pass of the last layer
                    rest, shared = self.units("language", layer)
                    # FSDP keeps its buffer, of the latest unit, if other ranks have a part of it
                    buffer = (shared or rest) * (self.settings.world_size > self.settings.expert_parallel)
                    found["language, experts forward"] = held | root | head | {
                        "gathered: a layer": c * (rest + shared + buffer) * self._sharded,
                        "layer, forward": self._experts(layer).forward(
                            load.tokens, not self._again("language", load), again=False)}
                pieces = load.sequences + (load.tokens // layer.window if layer.window else 0)
                for name, terms in self._layer("language", layer, load.tokens, pieces, load):
                    # one unit's gradients are in transit at a time: the head's or those that `_layer` counts
                    counted = terms.get("gradients in transit") or 4 * layer.units(self.settings.expert_parallel)[0]
                    since = max(0, since_loss - counted) if own_head else since_loss
                    whole = held | root | terms | {"gradient of the head": since}
                    of_others = found.get(f"language, {name}", {})
                    found[f"language, {name}"] = max(whole, of_others, key=lambda each: sum(each.values()))
        found["embedding, backward"] = root | {
            "inputs": inputs, "activations, vision": vision + features,
            "gradient of the embedding": embedding * (3 if shape.tied else 1),
            "gradients reduced": self._gathered("language", 0, 1),
            "gathered: last unit of the encoder": c * (
                shape.vision_projector or shape.vision_rest) * trains_vision * self._sharded}
        for block in shape.vision if trains_vision else ():
            pieces = load.patches // block.window if block.window else load.sequences
            for name, terms in self._layer("vision", block, load.patches, pieces, load._replace(degree=1)):
                found[f"vision, {name}"] = root | terms | {
                    "inputs": inputs, "activations, vision": (self._kept("vision", load, LEAST_LAYERS)
                                                              - self._merger_bytes() * load.patches),
                    "gathered: rest of the encoder": 2 * c * shape.vision_rest if self._sharded else 0,
                    "gradient of the embedding": c * self._root if self._sharded and embedding else 0}
        if trains_vision:
            found["vision, end of forward"] = {"inputs": inputs, "activations, vision": vision}
        if shape.vision and not trains_vision:
            # without gradients: the rotation in fp32, or the MLP
            block = shape.vision[0]
            wide = 8 if c < 4 else 0
            rotation = (5 * c + 16 + wide) * block.width
            found["vision, forward"] = root | {
                "inputs": inputs + 8 * block.head_width * load.patches,
                "gathered: a layer": self._gathered("vision", 3, 0),
                "gathered: rest of the encoder": 2 * c * shape.vision_rest if self._sharded else 0,
                "layer, forward": max(rotation, 3 * c * block.mlp_width + 2 * c * block.width) * load.patches}
        if self._sharded:
            count = sum(layer.count for layer in shape.language)  # a buffer, two units
            largest = c * max(sum(self.units("language", layer)) for layer in shape.language)
            found["language, forward"] = held | root | {
                "activations, language": language * max(0, count - 2) / count,
                # or, beside the last layer, the head
                "gathered: a layer": max(3 * largest, 2 * largest + c * own_head)}
            first = (shape.vision_rest - shape.vision_projector) if load.patches else (
                self.units("language", shape.language[0])[0])
            found["gathering"] = {"inputs": inputs, "gathered: embedding": 2 * c * self._root,
                                  "embeddings, features": 2 * c * shape.width * load.tokens + features,
                                  "gathered: first unit": 2 * c * first}
            if embedding:
                found["reduction of the embedding"] = {
                    "gradients reduced": (4 + c) * self._root,
                    # FSDP ends it after the root, since patches have no gradient
                    "rest of the encoder": c * (shape.vision_rest - shape.vision_projector) * trains_vision * (
                        1 + self._trains_weights["vision"])}
        if not self._sharded:
            ranks = self.settings.world_size
            part = min(SLICE_BYTES / 4, self.settings.num_trained(self.shape) / ranks)
            found["update"] = {"buckets": part * (4 + 3 * c)}  # the rank's slice of one, and three copies of it
            if self.settings.device == "cpu" and ranks > 1:
                found["update"]["gloo's copies"] = 2 * 4 * part * ranks  # of all that it reduces, two buckets at a time
        return found

    def _layer(
        self, part: str, layer: LayerShape, positions: int, pieces: int, load: PackLoad
    ) -> Iterator[tuple[str, Terms]]:
        """The moments of the last layer's backward pass, while all activations are still there."""
        c, trained = self._c, self._trains[part]
        attention = self._attention_kept(part, layer, load)
        again = self.layer_bytes(part, layer) + self._beside_tokens(layer, load) - attention
        again *= self._again(part, load)
        gradient = c * layer.width
        product = c * layer.width * layer.mlp_width * (layer.experts // self.settings.expert_parallel or 1)
        product *= self._trains_weights[part]
        weights, added = (product, 0) if self._sharded else (0, product)  # kept to the layer's end, or added at once
        # gradients of the layer behind this one are in transit once what that layer kept is gone: those of experts are
        # large beside it
        kept = c * layer.width + attention if self._recomputed(load) == 1.0 else self.layer_bytes(part, layer)
        freed = (1 - load.offload) * kept * positions if layer.experts else 0.0
        under_way = {"gathered: a layer": max(self._gathered(part, 2, 0), self._gathered(part, 2, 1) - freed)}
        # experts that ranks share are gathered and reduced between the rest of their layer and that of the next
        (rest, shared), (rest_reduced, shared_reduced) = (
            self.units(part, layer), [4 * count for count in self.units(part, layer, trained=True)])
        if shared:
            under_way = {"gathered: a layer": c * (2 * rest + shared), "gradients in transit": rest_reduced}
        narrow = c * layer.mlp_width * positions
        moments: Moments = {"MLP backward": (
            weights, max(narrow * ((3 if layer.gated else 2) - trained), narrow + added))}
        if layer.experts:
            experts = self._experts(layer)
            moments = experts.backward(positions, weights, added)
            if again:
                moments["experts forward again"] = (0.0, experts.forward(positions, True, again=True))
        for name, (of_weights, here) in moments.items():
            yield name, under_way | {"gradients of weights": of_weights, "layer, recomputed": again * positions,
                                     "layer, backward": gradient * positions + here}
        if self.settings.drops and part in self.settings.adapters:
            # two gradients of the MLP's last product and, for dropout, a hash and its copy, or a mask and a third
            # gradient
            dropout = (2 * c + max(4, 1 + c)) * (layer.shared_width or layer.mlp_width) * positions
            yield "dropout backward", under_way | {
                "layer, recomputed": again * positions, "dropout": dropout,
                "layer, backward": gradient * positions}
        gone = self._mlp(part, layer) + (layer.norms - 1) * layer.width * self._norm(part, layer)
        if shared:
            under_way = {"gathered: a layer": 2 * c * rest, "gradients in transit": shared_reduced}
            yield "reduction of experts", under_way | {
                "gradients of weights": 3 * weights, "layer, recomputed": again * positions,
                "layer, backward": (2 * gradient - self._mlp(part, layer)) * positions}
            weights = 0
        yield "attention backward", under_way | {
            "layer, recomputed": again * positions, "gradients of weights": 3 * weights,
            "layer, backward": (gradient - gone) * positions + self._attention(layer, positions, load),
            "attention workspace": workspace_bytes(layer, positions, positions + self._looked_back_on(layer, load),
                                                   pieces, c, self.settings.device)}
        yield "end of a layer", {
            "gathered: a layer": 3 * c * rest if shared else self._gathered(part, 3, 1),
            "gradients in transit": shared_reduced,
            "layer, backward": (gradient - self.layer_bytes(part, layer) + again) * positions}

    def _attention(self, layer: LayerShape, positions: int, load: PackLoad) -> float:
        """Bytes of the gradients of attention's output and of the kernel; between ranks also fp32 sums, and the buffers
        that are exchanged.
        """
        c, kernel, degree = self._c, 4 if self.settings.device == "cpu" else self._c, load.degree
        if layer.state_heads:  # of outputs, also chunk by chunk, and of inputs; of states, from all members; and a run
            of_rows = c * (2 * layer.state_heads * layer.state_values + self._convolved(layer))
            states = (degree > 1) * degree * layer.state_keys * layer.state_values
            in_run = min(positions, RUN_CHUNKS * STATE_CHUNK) * (self.run_bytes(layer) + 4 * layer.state_heads * (
                2 * layer.state_keys + layer.state_values + STATE_CHUNK))
            return positions * of_rows + 8.0 * layer.state_heads * states + in_run
        queries, key_values = layer.heads * layer.head_width, layer.key_value_heads * layer.head_width
        here = c * queries + kernel * (queries + 2 * key_values)
        if layer.window and layer in self.shape.language:  # sums, and rows gathered for the kernel
            gathered = (4 + 3 * c) * queries + 2 * c * key_values
            return (positions * (here + gathered)
                    + (positions + self._looked_back_on(layer, load)) * (8 + 4 * c) * key_values)
        if degree == 1:
            return float(positions * here)
        sums = 4 * queries + 8 * key_values
        # keys and values of two members, the sum that arrives, rows gathered for the kernel
        travels = 4 * c * key_values + 8 * key_values + 3 * c * queries
        return float(positions * (here + sums + travels))

    def _gathered(self, part: str, copies: int, reduced: int) -> float:
        """Bytes of a layer's gathered parameters (or gradients) if a rank has none of its own: `copies` of them in the
        computing type and `reduced` in fp32 (only `sync=micro_batch`).
        """
        if not self._sharded:
            return 0
        if not self._trains_weights[part]:
            copies = min(copies, 2)
        return max((copies * self._c * sum(self.units(part, layer))
                    + 4 * reduced * sum(self.units(part, layer, trained=True)) for layer in self._layers(part)),
                   default=0)

    def units(self, part: str, layer: LayerShape, trained: bool = False) -> tuple[float, float]:
        """`LayerShape.units` with adapters, or those of them that are `trained`."""
        adapters, sharing = self.settings.adapters, self.settings.expert_parallel
        own = adapters.get(part, 0) / self._num_layers(part)
        of_experts = self._adapters_of_experts if layer.experts else 0.0
        rest, experts = (0, 0) if trained and not self._trains_weights[part] else layer.units(sharing)
        if sharing == 1:
            return rest + own + of_experts, 0
        return rest + own, experts + of_experts / sharing

    def layer_bytes(self, part: str, layer: LayerShape) -> int:
        """Bytes that a layer keeps for each token (or patch) for its backward pass."""
        c = self._c
        queries, key_values = layer.heads * layer.head_width, layer.key_value_heads * layer.head_width
        own = 2 * c * layer.width if part == "vision" else 0
        if layer.query_key_norms:  # and a number for each head, which is normed separately
            own += ((queries + key_values) * (4 + (4 if layer.centered_norms else c) * self._trains_weights[part])
                    + 4 * (layer.heads + layer.key_value_heads))
        own += 2 * c * queries * layer.gated_attention
        return (layer.norms * layer.width * self._norm(part, layer) + 2 * c * (queries + key_values)
                + 4 * layer.heads + own + self._state_bytes(layer) + self._mlp(part, layer))

    @staticmethod
    def _convolved(layer: LayerShape) -> int:
        """Channels of a gated delta net's convolution: of queries, keys and values."""
        return 2 * layer.state_key_heads * layer.state_keys + layer.state_heads * layer.state_values

    def _rule_bytes(self, layer: LayerShape) -> int:
        """Bytes that the gated delta rule keeps for each token of its chunks: its inputs."""
        return self._c * self._convolved(layer) + (4 + self._c) * layer.state_heads

    def _state_bytes(self, layer: LayerShape) -> int:
        """Bytes that a gated delta net keeps for each token: the inputs of its rule, its convolution and its gated
        norm.
        """
        return (self._rule_bytes(layer) + 2 * self._c * self._convolved(layer)
                + (12 + 3 * self._c) * layer.state_heads * layer.state_values)

    @staticmethod
    def run_bytes(layer: LayerShape) -> int:
        """Bytes for each token of a run's chunks that are computed again, in fp32: their products, and states between
        them.
        """
        keys, values = layer.state_keys, layer.state_values
        numbers = 6 * keys + 3 * values + 5 * STATE_CHUNK + keys * values // STATE_CHUNK + 7
        return 4 * (layer.state_heads * numbers + 2 * layer.state_key_heads * keys)

    def _beside_tokens(self, layer: LayerShape, load: PackLoad) -> float:
        """Bytes for each token that a layer keeps of what does not follow from its tokens: in a sliding window received
        keys and values; in a gated delta net `_between_runs`, and in a pack on several ranks what each member's two
        pieces multiply states with.
        """
        if not layer.state_heads:
            rows = self._looked_back_on(layer, load)
            return 2 * self._c * layer.key_value_heads * layer.head_width * rows / max(1, load.tokens)
        told = (load.degree > 1) * 8 * load.degree * layer.state_heads * layer.state_keys**2
        return self._between_runs(layer, load, self._rule_bytes(layer)) + told / max(1, load.tokens)

    def _looked_back_on(self, layer: LayerShape, load: PackLoad) -> int:
        """The most tokens of other members that a member's two chunks of a pack look back on."""
        in_encoder = layer not in self.shape.language
        return 0 if in_encoder else min(2 * layer.window, (load.degree - 1) * load.tokens)

    @staticmethod
    def _between_runs(layer: LayerShape, load: PackLoad, row_bytes: int) -> float:
        """Bytes for each token of the states of a gated delta net's runs, in a pack on several ranks also those of a
        second pass over the chunks of pieces inside a sequence; and of the rows that pad a sequence's last chunk.
        """
        keys, values, apart = layer.state_keys, layer.state_values, load.degree > 1
        pieces = load.sequences + apart
        padding = (STATE_CHUNK - 1) * pieces * row_bytes
        runs = load.tokens / (STATE_CHUNK * (RUN_CHUNKS // min(pieces, RUN_STEPS)))  # at most
        states = 4 * layer.state_heads * keys * runs * (values + apart * (values + keys))
        return (padding + states) / max(1, load.tokens)

    def moved_bytes(self, load: PackLoad) -> float:
        """The most bytes of a pack's activations that are in host memory at a time."""
        moved = 0.0
        for part, positions in (("language", load.tokens), ("vision", load.patches)):
            # those of the language model are kept if anything before the loss is trained
            if self._trains["vision"] or (self._trains["language"] and part == "language"):
                count = self._num_layers(part)
                moved += positions * self._of_layers(part, load) * num_relieved(load.offload, count) / max(1, count)
        return moved

    def _layers(self, part: str) -> tuple[LayerShape, ...]:
        return self.shape.vision if part == "vision" else self.shape.language

    def _num_layers(self, part: str) -> int:
        return sum(layer.count for layer in self._layers(part))

    def _attention_kept(self, part: str, layer: LayerShape, load: PackLoad) -> float:
        """Bytes of a token's results of attention, if a layer that is recomputed keeps them: its output and log-sum-exp
        or, of a gated delta net, the output of its rule and the states after runs.
        """
        if part == "vision" or not self.settings.keeps_attention:
            return 0.0
        if layer.state_heads:
            return (self._c * layer.state_heads * layer.state_values
                    + self._between_runs(layer, load, self._c * layer.state_heads * layer.state_values))
        return layer.heads * (self._c * layer.head_width + 4.0)

    def _recomputed(self, load: PackLoad) -> float:
        """The share of layers that are recomputed."""
        return 1.0 if self.settings.recomputes else load.recomputed

    def _of_layers(self, part: str, load: PackLoad) -> float:
        """Bytes that all layers of a part keep for each token (or patch)."""
        share = self._recomputed(load)
        return sum(layer.count * (share * (self._c * layer.width + 8 * layer.experts_per_token)
                                  + (1 - share) * (self.layer_bytes(part, layer) + self._beside_tokens(layer, load)))
                   for layer in self._layers(part))

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
        c, positions, layers = self._c, load.patches if part == "vision" else load.tokens, self._layers(part)
        here = max(1 - load.offload, min(1.0, least / max(1, self._num_layers(part))))
        # of what keeps the results of attention there are no copies
        of_layers = self._of_layers(part, load) * here + self._recomputed(load) * sum(
            layer.count * self._attention_kept(part, layer, load) for layer in layers)
        if part == "language":
            return positions * (of_layers + 2 * c * max(layer.head_width for layer in layers))  # cosines and sines
        return positions * (of_layers + 8 * layers[0].head_width + self._merger_bytes())  # fp32 cosines and sines

    def _merger_bytes(self) -> float:
        """Bytes that the mergers keep for each patch: their norms, their first products and their activations."""
        shape = self.shape
        width, levels = shape.vision[0].width, shape.feature_levels
        # a projector after the encoder has a layer norm, whatever the encoder's norms are
        norm = self._norm("vision", replace(shape.vision[0], layer_norms=True) if shape.vision_projector
                          else shape.vision[0]) * width
        shared = self._c * width * (levels - 1)  # a layer norm's input, which the next block keeps too
        before = (shape.vision_norms - 1) * norm
        return before + levels * (norm + 2 * self._c * shape.merger_width / shape.merge_area) - shared

    def _norm(self, part: str, layer: LayerShape) -> int:
        """Bytes that a norm of a layer's kind keeps for each value of its input."""
        if layer.layer_norms:
            return self._c * (1 + self._trains[part])
        normalised = 4 if layer.centered_norms else self._c
        return 4 + self._c * self._trains[part] + normalised * self._trains_weights[part]

    def _mlp(self, part: str, layer: LayerShape) -> int:
        """Bytes that an MLP keeps for each position."""
        c = self._c
        if layer.experts:
            shared = layer.shared_width and c * (layer.shared_width * (3 + self._trains[part]) + layer.width + 1)
            return self._experts(layer).kept + shared
        return c * layer.mlp_width * ((3 if layer.gated else 1) + self._trains[part])

    def _experts(self, layer: LayerShape) -> ExpertBytes:
        return ExpertBytes(layer, self._c, self._trains_experts, self._adapters_of_experts,
                           self.settings.expert_parallel)
