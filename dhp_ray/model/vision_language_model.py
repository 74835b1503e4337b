"""What the vision-language models of transformers share: a language model, and the encoder of its images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from dhp_ray.model.fused import Operators
from dhp_ray.model.language_model import EncoderArguments, LanguageModel, LayerStack


class VisionLanguageModel(LanguageModel, ABC):
    """`LanguageModel` with an encoder. A family brings the encoder, and the modules whose parameters are gathered
    together.
    """

    vision_prefixes: ClassVar[tuple[str, ...]] = ("model.visual.",)

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__(module)
        config: Any = module.config
        self.vision_token_ids = config.image_token_id, getattr(config, "video_token_id", config.image_token_id)

    def encoder_arguments(self, grids: Sequence[Sequence[int]]) -> EncoderArguments:
        return self.arguments_of(torch.tensor(grids)) if grids else {}

    @abstractmethod
    def arguments_of(self, grids: Tensor) -> EncoderArguments:
        """`encoder_arguments` of one image or more, `grids` (N, 3)."""

    def encode(self, pixels: Tensor, arguments: EncoderArguments) -> Tensor:
        return self.features(pixels, arguments) if arguments else self.empty_features()

    @abstractmethod
    def features(self, pixels: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """`encode` of one image or more."""

    @abstractmethod
    def vision_stack(self) -> LayerStack:
        """The encoder's layers, the first of `stacks`."""

    def stacks(self) -> list[LayerStack]:
        return [self.vision_stack(), *super().stacks()]

    def vision_units(self) -> Sequence[Module]:
        """The encoder's part of `units`."""
        stack = self.vision_stack()
        return [*stack.layers, stack.owner]

    def units(self) -> list[Module]:
        return [*self.vision_units(), *super().units()]

    def fuse(self, operators: Operators) -> None:
        self.fuse_encoder(operators)
        super().fuse(operators)

    @abstractmethod
    def fuse_encoder(self, operators: Operators) -> None:
        """The encoder's part of `fuse`."""
