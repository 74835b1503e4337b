"""What the training step asks of a model, whatever its family.

The step calls the three parts one after the other, so that each can have its own layout over the ranks of a pack:

    encode (pixels of my images) -> features -> [exchange] -> decode (my tokens, the features that land on them) ->
    hidden -> loss_sum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dhp_ray.model.attention import PackContext
    from dhp_ray.model.fused import Operators
    from dhp_ray.model.kernels import Segments
    from dhp_ray.model.layout import PackLayout
    from dhp_ray.model.lora import LoraSettings
    from dhp_ray.model.loss import LossHead
    from dhp_ray.model.weights import StoredWeights
    from dhp_ray.planner.model_shape import ModelShape
    from dhp_ray.planner.plan import Grid

PARTS = ("vision", "language")
EncoderArguments = Mapping[str, "Tensor | Segments"]
"""By the names that a family's encoder has of them."""


class ImagePart(NamedTuple):
    """A part of an image whose parts attend to one another: which tokens (V,) of the image its rows of features are, in
    their order (its patches are theirs, in that order), what the encoder takes of it, and where the patches of the
    image's steps in time lie among the parts."""

    tokens: Tensor
    arguments: EncoderArguments
    layout: PackLayout


class NodeUnits(NamedTuple):
    """Submodules of a model whose parameters are read together, in the order of the forward pass; each is only used by
    calling it. `head` computes the loss, and its parameters' gradients with it; of `embedding` rows are looked up.
    """

    modules: Sequence[Module]
    head: LossHead
    embedding: Embedding


class LayerStack(NamedTuple):
    """Layers that run one after the other, and the module whose forward pass runs them."""

    owner: Module
    layers: Sequence[Module]


class ModelAdapter(Protocol):
    """One model family. Shapes: L local tokens, N images, P patches, V vision tokens, F feature width, D hidden width.
    """

    module: PreTrainedModel
    """The Hugging Face model; all trainable state is in its `named_parameters()`."""

    weights: StoredWeights | None
    """Where to read the parameters' values, of a module built on the meta device; None: it has them."""

    lora: LoraSettings | None
    """Of the adapters that are trained in place of the weights; None: there are none."""

    feature_width: int
    """F: width of a vision feature as it leaves the encoder: D, or several times as much where it has several levels.
    """

    image_token_id: int
    """The token that one vision token of an image takes in the text."""

    video_token_id: int
    """The token that one vision token of a video takes in the text."""

    merge_area: int
    """Patches that make one vision token."""

    patch_dim: int
    """Values of one patch: channels x frames x height x width."""

    vocabulary_size: int

    longest_sequence: int | None
    """Tokens of a sequence at most; None: the model sets no limit."""

    @property
    def smallest_grid(self) -> Grid:
        """Of the smallest image that the encoder takes."""
        ...

    @staticmethod
    def shape(config: Any) -> ModelShape:
        """What planner, costs and memory need to know of a model with this configuration of transformers."""
        ...

    def vision_runs(self, grid: Sequence[int], is_video: bool) -> Sequence[int]:
        """Lengths of the runs of vision tokens that an image or a whole video of this grid takes in the text."""
        ...

    def positions(self, input_ids: Tensor, grids: Tensor, seconds: Tensor | None = None) -> Tensor:
        """Rotary positions (3, L) of one whole sequence `input_ids` (L,) with images and videos of `grids` (N, 3);
        int64 on the CPU.

        `seconds` (N,) is what one step in time of a video lasts, and 0 for an image; without it, all are images.
        """
        ...

    def encoder_arguments(self, grids: Sequence[Sequence[int]]) -> EncoderArguments:
        """What the encoder takes from the sizes of images alone, `grids` of patches in time, height and width; on the
        CPU, made before a step. Empty where there is no image.
        """
        ...

    def image_parts(self, grid: Grid, num_parts: int) -> Sequence[ImagePart]:
        """More parts of an image than it has steps in time, each of nearly as many patches; on the CPU, made before a
        step.

        Raises:
            ValueError: it cannot be cut into so many.
        """
        ...

    def encode(self, pixels: Tensor, arguments: EncoderArguments, context: PackContext | None = None) -> Tensor:
        """Features (V, F) of the images whose patches are `pixels` (P, patch_dim); `arguments` are those of their
        grids, in their order, on the device of `pixels`.

        With a `context` it is a part of an image, whose layout that has: where the encoder attends over the whole
        image, it exchanges with the other parts' ranks, which must call it too.
        """
        ...

    def decode(
        self, token_ids: Tensor, positions: Tensor, vision_token_index: Tensor, features: Tensor, context: PackContext
    ) -> Tensor:
        """Hidden states (L, D) of a rank's shard of a pack.

        `token_ids` (L,), `positions` (3, L); row i of `features` (K, F) takes the place of local token
        `vision_token_index[i]`. Every member of the pack must call it: attention exchanges over `context`.
        """
        ...

    def loss_sum(self, hidden: Tensor, labels: Tensor, valid_index: Tensor) -> Tensor:
        """Sum, fp32, of the cross entropy of `hidden` (L, D) against `labels` (L,), already shifted, over the tokens
        that count: those at `valid_index` (K,).
        """
        ...

    def predictions(self, hidden: Tensor, valid_index: Tensor) -> Tensor:
        """The tokens (K,) int64 that most likely follow those at `valid_index` (K,), of `hidden` (L, D)."""
        ...

    def is_vision(self, parameter_name: str) -> bool:
        """Whether a parameter belongs to the vision encoder (its projector included)."""
        ...

    def decays(self, parameter_name: str) -> bool:
        """Whether weight decay applies: to matrices, not to biases and norms."""
        ...

    def trains(self, part: str) -> bool:
        """Whether any parameter of "vision" or of "language" is trained; the same on all ranks."""
        ...

    def freeze(self, parts: Sequence[str]) -> None:
        """Leave "vision" or "language" as they are."""
        ...

    def add_lora(self, settings: LoraSettings) -> None:
        """Train adapters on linear layers, in place of the weights; parts that are frozen by then get none. Call it
        once, before `fuse`.
        """
        ...

    def units(self) -> Sequence[Module]:
        """The submodules whose parameters are gathered on their own where they are sharded, inner ones first; each is
        only used by calling it.
        """
        ...

    def one_row_parameters(self) -> Sequence[Parameter]:
        """Parameters whose leading dimensions are 1; the forward pass accepts them squeezed. (Sharded by rows, one row
        would be padded to as many as there are ranks.)
        """
        ...

    def stack(self, part: str) -> LayerStack:
        """The layers of "vision" or of "language"."""
        ...

    def node_units(self) -> NodeUnits:
        """The submodules whose parameters are read together where they lie once per node; each parameter is in one."""
        ...

    def fuse(self, operators: Operators) -> None:
        """Compute norms, rotations and gated MLPs by these operators; parameters and their names stay."""
        ...

    def set_activation_checkpointing(self, wanted: bool = True) -> None:
        """Recompute each layer's activations in the backward pass, or keep them; may change between two steps."""
        ...

    def save(self, folder: str | Path, parameters: Mapping[str, Tensor]) -> None:
        """Write config and safetensors that `from_pretrained` loads, with LoRA an adapter that PEFT loads. `parameters`
        are full fp32 CPU tensors by name.
        """
        ...


def empty_features(adapter: ModelAdapter) -> Tensor:
    """Features (0, F) of no image, in the type and on the device that `encode` gives."""
    parameter = next(adapter.module.parameters())
    return torch.empty(0, adapter.feature_width, dtype=parameter.dtype, device=parameter.device)
