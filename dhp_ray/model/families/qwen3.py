"""Qwen3 (arXiv 2505.09388), dense: queries and keys are normed."""

from __future__ import annotations

from transformers import Qwen3Config, Qwen3ForCausalLM

from dhp_ray.model.language_model import LanguageModel


class Qwen3(LanguageModel):
    """`LanguageModel` of Qwen3."""

    model_class = Qwen3ForCausalLM
    config_class = Qwen3Config
