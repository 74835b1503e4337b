"""Qwen3, dense and with experts, text-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from dhp_ray.data.families.base import Family

# Renders what the template of Qwen3-4B-Instruct-2507 does with texts.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""


class Qwen3Family(Family):
    name: ClassVar[str] = "qwen3"
    chat_template: ClassVar[str] = CHAT_TEMPLATE
    tokens: ClassVar[Mapping[str, str]] = {"bos": "<|endoftext|>", "eos": "<|im_end|>", "pad": "<|endoftext|>"}
    special_tokens: ClassVar[Sequence[str]] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    structure_tokens: ClassVar[Sequence[str]] = special_tokens


class Qwen3MoeFamily(Qwen3Family):
    name: ClassVar[str] = "qwen3_moe"
