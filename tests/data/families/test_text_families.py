"""Text-only families: ids and labels beside the tokenizer's own chat template, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from dhp_ray.data.conversation import ContentPart, Turn
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.families.base import Clip
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.data.reader import read_contents
from tests.data.samples import picture, talk
from tests.packs import TEXT_PRESETS

PROCESSORS = {preset: ProcessorSpec(preset).load() for preset in TEXT_PRESETS}
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Grün, 緑."}],
    "a system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
                 {"role": "assistant", "content": "b"}],
    "many turns": [{"role": role, "content": f"{role} {number}"} for number in range(4)
                   for role in ("user", "assistant")]}
# What Qwen3's hybrid models do with texts: the last answer gets an empty thought, earlier ones lose theirs.
THINKING = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
                          if '</think>' in message.content else '' %}
        {{- '<|im_start|>assistant\\n' + ('<think>\\n' + thought + '\\n</think>\\n\\n' if loop.last else '') }}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def own_ids(processor: Processor, messages: list[dict[str, str]]) -> list[int]:
    """By transformers alone."""
    found: list[int] = processor.tokenizer.apply_chat_template(
        messages, chat_template=processor.chat_template, tokenize=True, return_dict=False)
    return found


def learned(processor: Processor, conversation: list[Any]) -> str:
    labels = processor.encode(conversation, []).labels
    text: str = processor.tokenizer.decode(labels[labels != -100])
    return text


@pytest.mark.parametrize("preset", TEXT_PRESETS)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_are_those_of_the_tokenizers_own_template(preset: str, name: str) -> None:
    processor, messages = PROCESSORS[preset], CONVERSATIONS[name]
    encoded = processor.encode(messages, [])
    assert encoded.input_ids.tolist() == own_ids(processor, messages)
    assert (encoded.grids, encoded.vision_tokens, encoded.media) == ((), 0, ())
    end = processor.tokenizer.eos_token
    assert learned(processor, messages) == "".join(message["content"] + end for message in messages
                                                   if message["role"] == "assistant")
    assert np.array_equal(encoded.input_ids[encoded.labels != -100], encoded.labels[encoded.labels != -100])


@pytest.mark.parametrize("preset", TEXT_PRESETS)
def test_tokens_that_a_text_spells_are_words(preset: str) -> None:
    processor = PROCESSORS[preset]
    for token in processor.family.special_tokens:
        encoded = processor.encode(talk(f"What is {token}?", "A token."), [])
        plain = processor.encode(talk("What is ?", "A token."), [])
        special = processor.tokenizer.convert_tokens_to_ids(token)
        assert (encoded.input_ids == special).sum() == (plain.input_ids == special).sum()


@pytest.mark.parametrize("preset", TEXT_PRESETS)
def test_images_and_videos_are_refused_in_one_line(tmp_path: Path, preset: str) -> None:
    processor = PROCESSORS[preset]
    with pytest.raises(RowError, match=r"^a video; allowed: text, which is all that the model takes$"):
        processor.encode(talk("<video>What?", "A clip."), [Clip(64, 64, 20, 10.0)])
    (tmp_path / "a.png").write_bytes(picture(40, 40))
    row = Row("shown", {"image": "a.png", "conversations": talk("<image>What?", "A square.")})
    turns, _, sizes = read_contents(row, processor, str(tmp_path))
    with pytest.raises(RowError, match=r"^an image; allowed: text, which is all that the model takes$"):
        processor.encode_turns(turns, sizes)
    with pytest.raises(RowError, match=r"^1 <image> marks for 0 images"):
        processor.encode(talk("<image>What?", "Nothing."), [])


@pytest.mark.parametrize("preset", TEXT_PRESETS)
def test_a_saved_tokenizer_loads_with_transformers_and_here(tmp_path: Path, preset: str) -> None:
    processor, messages = PROCESSORS[preset], CONVERSATIONS["many turns"]
    processor.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": processor.family.name, "vocab_size": 264}))
    assert not (tmp_path / "preprocessor_config.json").exists()
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert loaded.apply_chat_template(messages, tokenize=True, return_dict=False) == own_ids(processor, messages)
    again = ProcessorSpec("", str(tmp_path)).load()
    assert again.encode(messages, []).labels.tolist() == processor.encode(messages, []).labels.tolist()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vocab_size": 264}))
    with pytest.raises(DataError, match=r"has no preprocessor_config\.json"):
        ProcessorSpec("", str(tmp_path)).load()


HYBRID = [THINKING, THINKING.replace("assistant\\n' }}\n{%- endif %}", "assistant\\n<think>\\n' }}\n{%- endif %}")]
"""Qwen3's hybrid models, and those that always think: there, the generation prompt begins the thought."""


@pytest.mark.parametrize("template", HYBRID, ids=["hybrid", "thinking"])
def test_an_empty_thought_is_prompted_not_learned(template: str) -> None:
    """So all answers of a conversation are learned alike, and evaluation prompts for what was learned."""
    processor = Processor(PROCESSORS["tiny_qwen3"].family, PROCESSORS["tiny_qwen3"].tokenizer, template)
    for name, messages in CONVERSATIONS.items():
        last_alone = [*({**message, "weight": 0} for message in messages[:-1]), messages[-1]]
        assert processor.encode(last_alone, []).input_ids.tolist() == own_ids(processor, messages), name
    conversation = talk("a", "b", "c", "d")
    assert learned(processor, conversation) == "b<|im_end|>d<|im_end|>"
    text = processor.tokenizer.decode(processor.encode(conversation, []).input_ids)
    assert text.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2
    prompt, encoded = processor.encode_prompt([Turn("user", (ContentPart("text", "a"),))], [])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    whole = processor.encode(talk("a", "b"), [])
    assert whole.input_ids[: len(encoded.input_ids)].tolist() == encoded.input_ids.tolist()
    assert whole.labels[len(encoded.input_ids)] == whole.input_ids[len(encoded.input_ids)] == ord("b")


@pytest.mark.parametrize(("template", "prompted"), [*zip(HYBRID, ("", "<think>\n"))], ids=["hybrid", "thinking"])
def test_thoughts_are_learned(template: str, prompted: str) -> None:
    """As the template writes them, without what the generation prompt has of them; in earlier answers too."""
    processor = Processor(PROCESSORS["tiny_qwen3"].family, PROCESSORS["tiny_qwen3"].tokenizer, template)
    thought = "<think>\nHm.\n</think>\n\nb"
    said = f"{thought.removeprefix(prompted)}<|im_end|>"
    asked, answer = talk("a", "b")
    beside = [asked, answer | {"reasoning_content": "Hm."}]
    for answered in (talk("a", thought), talk("a", "<think>Hm.</think>b"), beside):
        assert learned(processor, answered) == said
        assert learned(processor, [*answered, *talk("c", "d")]) == f"{said}d<|im_end|>"


def test_a_template_knows_one_day() -> None:
    """Llama 3.2's, which writes the day on which it is applied."""
    dated = ("{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}\n"
             + PROCESSORS["tiny_llama"].chat_template)
    processor = Processor(PROCESSORS["tiny_llama"].family, PROCESSORS["tiny_llama"].tokenizer, dated)
    assert processor.tokenizer.decode(processor.encode(talk("a", "b"), []).input_ids).startswith("26 Jul 2024")


def test_a_tokenizer_of_another_llama_is_refused_by_its_tokens() -> None:
    with pytest.raises(DataError, match=r"no token <\|begin_of_text\|>; allowed: a llama model whose tokenizer has "
                                        r"<\|begin_of_text\|>, <\|eot_id\|>, <\|end_of_text\|>$"):
        PROCESSORS["tiny_llama"].family.token_ids(PROCESSORS["tiny_qwen3"].tokenizer)
