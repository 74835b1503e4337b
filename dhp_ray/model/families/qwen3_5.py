"""Qwen3.5, dense and with experts: of four layers three are gated delta nets, one is attention whose output is gated;
Qwen3-VL's encoder with features of one level.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from dhp_ray.model.experts import has_experts
from dhp_ray.model.families.qwen3_vl import Qwen3Vision
from dhp_ray.model.files import ModelError
from dhp_ray.model.fused import FusedMLP, Operators
from dhp_ray.model.gated_delta_net import GatedDeltaNet


class Qwen35(Qwen3Vision):
    """`VisionLanguageModel` of Qwen3.5."""

    model_class: ClassVar[type[PreTrainedModel]] = Qwen3_5ForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = Qwen3_5Config
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "linear_attention")

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        text = config.text_config
        if text.hidden_act != "silu":
            raise ModelError(f"model: hidden_act is {text.hidden_act!r} with gated delta nets; allowed: silu")
        if text.linear_num_value_heads % text.linear_num_key_heads:
            raise ModelError(f"model: linear_num_value_heads is {text.linear_num_value_heads}; allowed: multiples of "
                             f"{text.linear_num_key_heads}, its linear_num_key_heads")

    def replace_modules(self) -> None:
        super().replace_modules()
        for layer in self.language.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn = GatedDeltaNet(layer.linear_attn)

    def fuse_language(self, operators: Operators) -> None:
        """The MLPs alone: norms multiply with 1 + weight, attention rotates a quarter of a head."""
        for layer in self.language.layers:
            if has_experts(layer):
                layer.mlp.shared_expert = FusedMLP(layer.mlp.shared_expert, operators)
            else:
                layer.mlp = FusedMLP(layer.mlp, operators)

    def mixer_shape(self, text: Any, layer: Any) -> dict[str, Any]:
        return {**super().mixer_shape(text, layer), "centered_norms": True,
                "gated_attention": hasattr(layer, "self_attn")}


class Qwen35Moe(Qwen35):
    """`VisionLanguageModel` of Qwen3.5 with experts, of which each layer has a shared one too."""

    model_class = Qwen3_5MoeForConditionalGeneration
    config_class = Qwen3_5MoeConfig
