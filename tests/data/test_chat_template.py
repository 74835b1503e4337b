"""What chat templates write, and what they leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dhp_ray.data.errors import RowError
from dhp_ray.data.processor import Processor, ProcessorSpec
from tests.data.samples import processor, talk
from tests.data.test_processor import word_tokenizer

PROCESSOR = processor()
FIRST_SYSTEM_TURN = """{% for message in messages %}
{%- if message['role'] != 'system' or loop.first -%}
<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def learned(conversation: list[dict[str, Any]], of: Processor = PROCESSOR) -> str:
    encoded = of.encode(conversation, [])
    text = of.tokenizer.decode(encoded.labels[encoded.labels != -100])
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"loss": False}, {"train": False},
                                  {"training": False}])
def test_a_turn_without_weight_is_shown_and_not_learned(mark: dict[str, Any]) -> None:
    first, answer, *rest = talk("a", "false", "b", "true")
    conversation = [first, answer | mark, *rest]
    assert learned(conversation) == "true<|im_end|>"
    assert PROCESSOR.encode(conversation, []).input_ids.tolist() == PROCESSOR.encode(
        talk("a", "false", "b", "true"), []).input_ids.tolist()
    for other in ({"weight": 1, "loss": None}, {"train": True, "train_detail": None}):
        shown = first | {"weight": 0.5, "train": False}
        assert learned([shown, answer | other, *rest]) == "false<|im_end|>true<|im_end|>"


def test_nothing_but_turns_without_weight_is_a_bad_row() -> None:
    first, answer = talk("a", "b")
    with pytest.raises(RowError, match="no turn of the assistant has a weight"):
        PROCESSOR.encode([first, answer | {"weight": 0}], [])
    with pytest.raises(RowError, match=r"turn 2 has weight 0\.5; allowed: 0 or false, 1 or true"):
        PROCESSOR.encode([first, answer | {"weight": 0.5}], [])


def test_what_axolotl_learns_of_other_turns_or_parts_of_turns_is_refused() -> None:
    first, answer = talk("a", "b")
    for name in ("train", "training"):
        with pytest.raises(RowError, match=f"^turn 1, of the user, has {name} True; allowed: in turns of the "):
            PROCESSOR.encode([first | {name: True}, answer], [])
        detail = [{"begin_offset": 0, "end_offset": 0, "train": False}]
        with pytest.raises(RowError, match=f"^turn 2 has {name}_detail; allowed: train, true or false, for a whole"):
            PROCESSOR.encode([first, answer | {name: True, f"{name}_detail": detail}], [])


def test_a_template_that_leaves_a_turn_out_makes_bad_rows(tmp_path: Path) -> None:
    word_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(FIRST_SYSTEM_TURN)
    loaded = ProcessorSpec(path=str(tmp_path)).load()
    system = {"from": "system", "value": "one"}
    assert learned([system, *talk("a", "true")], loaded) == "true<|im_end|>"
    late = [system, *talk("a", "true"), {"from": "system", "value": "two"}, *talk("b", "true")]
    with pytest.raises(RowError, match="the chat template leaves out or changes turn 4, of the system"):
        loaded.encode(late, [])


def test_a_thought_beside_an_answer_lies_before_it() -> None:
    """Also where the template knows nothing of thoughts."""
    first, answer = talk("a", "b")
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert learned([first, answer | {name: " Hm.\n"}]) == "<think>\nHm.\n</think>\n\nb<|im_end|>"
        assert learned([first, answer | {name: None}]) == "b<|im_end|>"
    both = answer | {"reasoning_content": "Hm.", "thinking": "Hm."}  # as some servers write it
    assert learned([first, both]) == "<think>\nHm.\n</think>\n\nb<|im_end|>"
    with pytest.raises(RowError, match=r"^turn 2 has reasoning_content and thinking, which differ; allowed: one of th"):
        PROCESSOR.encode([first, both | {"thinking": "Oh."}], [])
    assert learned([first, answer | {"reasoning_content": " "}]) == "b<|im_end|>"
    with pytest.raises(RowError, match=r"^turn 2 has reasoning_content, and </think> in its text; allowed: "):
        PROCESSOR.encode([first, {"from": "gpt", "value": "<think>a</think>b", "reasoning_content": "Hm."}], [])
    with pytest.raises(RowError, match=r"^turn 2 has reasoning_content \['Hm\.'\]; allowed: a text$"):
        PROCESSOR.encode([first, answer | {"reasoning_content": ["Hm."]}], [])
    with pytest.raises(RowError, match="turn 2 has no text in value"):
        PROCESSOR.encode([first, {"from": "gpt", "value": "", "reasoning_content": "Hm."}], [])


def test_an_empty_text_of_the_system_is_a_turn() -> None:
    """As a server has it, which gets the same messages; a template may have a text of its own where there is no turn.
    """
    turns = [{"role": "system", "content": ""}, *talk("a", "b")]
    assert PROCESSOR.tokenizer.decode(PROCESSOR.encode(turns, []).input_ids) == PROCESSOR.tokenizer.apply_chat_template(
        [{"role": "system", "content": ""}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        chat_template=PROCESSOR.chat_template, tokenize=False)
    assert learned(turns) == "b<|im_end|>"
    for content in ([], [""], [{"type": "text", "text": ""}]):
        of_parts = [{"role": "system", "content": content}, *talk("a", "b")]
        assert PROCESSOR.encode(of_parts, []).input_ids.tolist() == PROCESSOR.encode(turns, []).input_ids.tolist()
    for turn in ({"role": "system", "content": None}, {"role": "system", "value": "c"}, {"from": "system", "value": []},
                 {"role": "user", "content": ""}):
        with pytest.raises(RowError, match=r"^turn 1 has no text in (content|value)"):
            PROCESSOR.encode([turn, *talk("a", "b")], [])


@pytest.mark.parametrize(("preset", "breaks"), [("tiny", 1), ("tiny_qwen3_vl", 1), ("tiny_internvl", 1)])
def test_one_line_break_follows_an_image_of_llava(preset: str, breaks: int) -> None:
    """InternVL's template writes one itself, those of Qwen none."""
    of = ProcessorSpec(preset).load()
    for text in ("<image>\nWhat?", "<image>\n<image>\nWhat?"):
        images = text.count("<image>")
        written = of.tokenizer.decode(of.encode(talk(text, "b"), [(112, 112)] * images).input_ids)
        assert written.count("\n\n") == 0
        before = written.partition("What?")[0]
        assert before.endswith("\n" * breaks)
        assert not before.endswith("\n" * (breaks + 1))


def test_a_line_break_in_a_part_of_its_own_stays() -> None:
    of = ProcessorSpec("tiny_internvl").load()
    parts = [{"type": "image"}, {"type": "text", "text": "\nWhat?"}]
    encoded = of.encode([{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}], [(112, 112)])
    assert of.tokenizer.decode(encoded.input_ids).partition("What?")[0].endswith("\n\n")
