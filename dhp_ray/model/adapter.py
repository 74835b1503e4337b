"""The interface between the training step and a model family.

The step calls the three parts in turn, so that each can have its own layout over the ranks of a pack:

    encode (pixels of my images) -> features -> [exchange] -> decode (my tokens, the features that land on them) ->
    hidden -> loss_sum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dhp_ray.model.attention import PackContext
    from dhp_ray.model.fused import Operators
    from dhp_ray.model.kernels import Segments
    from dhp_ray.model.lora import LoraSettings
    from dhp_ray.model.weights import StoredWeights
    from dhp_ray.planner.memory.model_shape import ModelShape
    from dhp_ray.planner.plan.types import Grid

PARTS = ("vision", "language")
EncoderArguments = Mapping[str, "Tensor | Segments"]
"""Arguments of a family's encoder, by name."""


class LayerStack(NamedTuple):
    """Consecutive layers, and the module whose forward pass runs them."""

    owner: Module
    layers: Sequence[Module]


class ModelAdapter(Protocol):
    """One model family. Shapes: L local tokens, N images, P patches, V vision tokens, F feature width, D hidden width.
    """

    module: PreTrainedModel
    """The Hugging Face model; all trainable state is in its `named_parameters()`."""

    weights: StoredWeights | None
    """Where to read the parameter values of a module built on the meta device; None if the module has its values."""

    lora: LoraSettings | None
    """Settings of the adapters that are trained instead of the weights; None without adapters."""

    feature_width: int
    """F: width of a vision feature as the encoder returns it: D, or a multiple of D if it has several levels."""

    image_token_id: int
    """The placeholder token in the text for each vision token of an image."""

    video_token_id: int
    """The placeholder token in the text for each vision token of a video."""

    merge_area: int
    """Number of patches that are merged into one vision token."""

    patch_dim: int
    """Number of values in one patch: channels x frames x height x width."""

    vocabulary_size: int

    longest_sequence: int | None
    """The most tokens that a sequence may have; None if the model sets no limit."""

    @property
    def smallest_grid(self) -> Grid:
        """Grid of the smallest image that the encoder accepts."""
        ...

    @staticmethod
    def shape(config: Any) -> ModelShape:
        """Sizes for planner, costs and memory of a model with this transformers configuration."""
        ...

    def vision_runs(self, grid: Sequence[int], is_video: bool) -> Sequence[int]:
        """Lengths of the runs of vision tokens in the text for an image, or a whole video, of this grid."""
        ...

    def positions(self, input_ids: Tensor, grids: Tensor, seconds: Tensor | None = None) -> Tensor:
        """Rotary positions (3, L) of one whole sequence `input_ids` (L,) with images and videos of `grids` (N, 3);
        int64 on the CPU.

        `seconds` (N,): the duration of one time step of a video, 0 for an image; None if all are images.
        """
        ...

    def encoder_arguments(self, grids: Sequence[Sequence[int]]) -> EncoderArguments:
        """Encoder arguments that depend only on the sizes of the images, `grids` of patches in time, height and width.
        They are made on the CPU before a step; empty without images.
        """
        ...

    def encode(self, pixels: Tensor, arguments: EncoderArguments) -> Tensor:
        """Features (V, F) of the images with the patches `pixels` (P, patch_dim). `arguments`: `encoder_arguments` of
        their grids in the same order, on the device of `pixels`.
        """
        ...

    def decode(
        self, token_ids: Tensor, positions: Tensor, vision_token_index: Tensor, features: Tensor, context: PackContext
    ) -> Tensor:
        """Hidden states (L, D) of a rank's shard of a pack.

        `token_ids` (L,), `positions` (3, L); row i of `features` (K, F) replaces the embedding of local token
        `vision_token_index[i]`. Every member of the pack must call this, since attention exchanges over `context`.
        """
        ...

    def loss_sum(self, hidden: Tensor, labels: Tensor, valid_index: Tensor) -> Tensor:
        """Sum, in fp32, of the cross entropy of `hidden` (L, D) and the shifted `labels` (L,) over the tokens at
        `valid_index` (K,).
        """
        ...

    def predictions(self, hidden: Tensor, valid_index: Tensor) -> Tensor:
        """The most likely next tokens (K,) int64 after those at `valid_index` (K,) of `hidden` (L, D)."""
        ...

    def is_vision(self, parameter_name: str) -> bool:
        """Whether a parameter belongs to the vision encoder, including its projector."""
        ...

    def decays(self, parameter_name: str) -> bool:
        """Whether weight decay applies: to matrices, not to biases and norms."""
        ...

    def trains(self, part: str) -> bool:
        """Whether any parameter of "vision" or of "language" is trained; the same on all ranks."""
        ...

    def freeze(self, parts: Sequence[str]) -> None:
        """Exclude "vision" or "language" from training."""
        ...

    def add_lora(self, settings: LoraSettings) -> None:
        """Train adapters on linear layers instead of the weights, except in parts that are already frozen. Call this
        once, before `fuse`.
        """
        ...

    def units(self) -> Sequence[Module]:
        """The submodules whose parameters are gathered separately when sharded, inner ones first. Each is used only by
        calling it.
        """
        ...

    def one_row_parameters(self) -> Sequence[Parameter]:
        """Parameters whose leading dimensions are 1, which the forward pass also accepts squeezed. (Sharding by rows
        would pad their single row to one row for each rank.)
        """
        ...

    def stack(self, part: str) -> LayerStack:
        """The layers of "vision" or of "language"."""
        ...

    def fuse(self, operators: Operators) -> None:
        """Compute norms, rotary embeddings and gated MLPs with these operators. Parameters and their names stay."""
        ...

    def set_activation_checkpointing(self, share: float = 1.0) -> None:
        """Recompute this share of the layers in the backward pass, the first ones of the encoder and of the language
        model, and keep the activations of the others. May change between two packs.
        """
        ...

    def save(self, folder: str | Path, parameters: Mapping[str, Tensor]) -> None:
        """Write config and safetensors for `from_pretrained`, or with LoRA an adapter for PEFT. `parameters` are full
        fp32 CPU tensors by name.
        """
        ...


def empty_features(adapter: ModelAdapter) -> Tensor:
    """Features (0, F) without any image, with the dtype and device of those from `encode`."""
    parameter = next(adapter.module.parameters())
    return torch.empty(0, adapter.feature_width, dtype=parameter.dtype, device=parameter.device)
