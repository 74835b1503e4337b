"""Llama 3 (arXiv 2407.21783)."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from dhp_ray.model.language_model import LanguageModel


class Llama(LanguageModel):
    """`LanguageModel` of Llama 3."""

    model_class = LlamaForCausalLM
    config_class = LlamaConfig
