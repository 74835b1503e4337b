"""Qwen3 (arXiv 2505.09388), dense and with experts: queries and keys are normed."""

from __future__ import annotations

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dhp_ray.model.language_model import LanguageModel


class Qwen3(LanguageModel):
    """`LanguageModel` of Qwen3."""

    model_class = Qwen3ForCausalLM
    config_class = Qwen3Config
    layer_types = ("full_attention", "sliding_attention")


class Qwen3Moe(LanguageModel):
    """`LanguageModel` of Qwen3 with experts."""

    model_class = Qwen3MoeForCausalLM
    config_class = Qwen3MoeConfig
