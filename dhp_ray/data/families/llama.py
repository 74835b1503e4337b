"""Llama 3, text-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from dhp_ray.data.families.base import Family

# Renders what the template of Llama-3-8B-Instruct does.
CHAT_TEMPLATE = """
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt else '' -}}
"""


class LlamaFamily(Family):
    name: ClassVar[str] = "llama"
    chat_template: ClassVar[str] = CHAT_TEMPLATE
    tokens: ClassVar[Mapping[str, str]] = {
        "bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "pad": "<|end_of_text|>"}
    special_tokens: ClassVar[Sequence[str]] = (
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    structure_tokens: ClassVar[Sequence[str]] = special_tokens
