"""A byte-level tokenizer for the presets: 256 bytes and special tokens, by default those of Qwen2.5-VL with its chat
template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dhp_ray.data.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
                  "<|video_pad|>")
TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>",
          "vision_end": "<|vision_end|>", "bos": "<|endoftext|>", "eos": "<|im_end|>", "pad": "<|endoftext|>"}
"""By purpose, with the names that the Qwen families use."""

# Renders exactly what Qwen2.5-VL's own template does. Jinja's whitespace control (-) keeps it readable here.
CHAT_TEMPLATE = """
{%- set images = namespace(count=0) -%}
{%- set videos = namespace(count=0) -%}
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{%- set images.count = images.count + 1 -%}
{{- 'Picture ' ~ images.count ~ ': ' if add_vision_id else '' -}}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{%- set videos.count = videos.count + 1 -%}
{{- 'Video ' ~ videos.count ~ ': ' if add_vision_id else '' -}}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""

DEFAULT_SYSTEM = CHAT_TEMPLATE[CHAT_TEMPLATE.index("{%- if loop.first") : CHAT_TEMPLATE.index("{{- '<|im_start|>' +")]
"""The part of the template that writes a system turn if a conversation has none."""


def byte_tokenizer(
    special_tokens: Sequence[str] = SPECIAL_TOKENS, chat_template: str = CHAT_TEMPLATE,
    named_tokens: Mapping[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """A tokenizer in which every byte of UTF-8 text is one token, whose id is the byte. Special tokens have the ids
    from 256 on; it also has some of them by name (`named_tokens`).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(_byte_characters())},
                                     merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=list(special_tokens[1:]), model_specific_special_tokens=dict(named_tokens or {}),
        chat_template=chat_template, clean_up_tokenization_spaces=False, model_max_length=1 << 30)


def special_token_ids(tokenizer: Any, names: Mapping[str, str] = TOKENS) -> dict[str, int]:
    """Ids of the tokens in `names`, by purpose.

    Raises:
        DataError: the tokenizer lacks one.
    """
    vocabulary = tokenizer.get_vocab()
    for token in names.values():
        if token not in vocabulary:
            raise DataError(
                f"model.path: its tokenizer has no token {token}; allowed: the tokenizer that the model was published "
                "with"
            )
    return {purpose: int(vocabulary[token]) for purpose, token in names.items()}


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (as GPT-2 does)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
