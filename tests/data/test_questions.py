"""Questions: their prompts are those that the model's own template asks with, and end where the answer's labels begin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.evaluation import read_question, read_references
from dhp_ray.data.formats import read_rows
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.fragments import Fragments
from dhp_ray.data.index import check_answers, held_out, index_fragments
from dhp_ray.data.processor import IGNORE, ProcessorSpec
from dhp_ray.schema import Data
from tests.data.samples import picture, talk, video, write_rows
from tests.data.test_processor import word_tokenizer
from tests.packs import PATCH_DIMS

PROCESSORS = {preset: ProcessorSpec(preset).load() for preset in PATCH_DIMS}
PROCESSOR = PROCESSORS["tiny"]


def row(conversation: Any, **fields: Any) -> Row:
    return Row("a", {"conversations": conversation} | fields)


@pytest.mark.parametrize("preset", PROCESSORS)
def test_the_prompt_is_what_is_trained_before_the_last_answer(preset: str) -> None:
    """Ids, grids and labels of a conversation with images, a video, earlier answers, and a question behind the last
    one.
    """
    processor = PROCESSORS[preset]
    talked = talk("<image>What?", "One.", "<video>And\n<image>here?", "The last\nanswer.", "Thanks <image>")
    images = [picture(60, 90), picture(120, 70), picture(56, 56)]
    question = read_question(row(talked, images=images, video=video(9)), processor, "")
    length = len(question.prompt.input_ids)
    assert np.array_equal(question.whole.input_ids[:length], question.prompt.input_ids)
    assert set(question.prompt.labels) == {IGNORE}
    behind = question.whole.labels[length:]
    assert processor.tokenizer.decode(behind[behind != IGNORE]) == f"The last\nanswer.{processor.tokenizer.eos_token}"
    assert behind[0] != IGNORE
    count = len(question.prompt.grids)
    assert question.whole.grids[:count] == question.prompt.grids
    assert len(set(question.whole.media)) == 4
    assert len(set(question.prompt.media)) == 3
    assert question.references == ("The last\nanswer.",)
    turns = [turn.message() for turn in read_turns(talked)][:3]
    assert question.prompt_text == processor.tokenizer.apply_chat_template(
        turns, chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True)


def test_an_answer_that_begins_with_a_line_break_leaves_the_prompt_alone() -> None:
    question = read_question(row(talk("What?", "\n\nYes.")), PROCESSOR, "")
    assert PROCESSOR.tokenizer.decode(question.prompt.input_ids).endswith("<|im_start|>assistant\n")
    assert question.references == ("Yes.",)


@pytest.mark.parametrize("answer", ["Yes", " Yes", "   Yes", "\nYes", "\n\n  true", " \n Yes\n", "\r\nYes", "\t\n\n"])
def test_an_answer_is_trained_behind_the_ids_of_its_prompt(answer: str, tmp_path: Path) -> None:
    """Tokenizers have tokens of several line breaks, one of which may be the prompt's last."""
    processor = ProcessorSpec(path=str(word_tokenizer(tmp_path))).load()
    assert len(processor.tokenizer("\n\n")["input_ids"]) == 1
    weightless = {"from": "gpt", "value": answer, "weight": 0}
    for talked in (talk("<image>What?", answer), talk("A\n<|im_end|>", "true", "<image>B", answer, "And?"),
                   [*talk("<image>\n"), weightless, *talk("true?", answer)]):
        question = read_question(row(talked, image=picture(60, 90)), processor, "")
        length = len(question.prompt.input_ids)
        assert question.whole.input_ids[:length].tolist() == question.prompt.input_ids.tolist()
        learned = question.whole.labels[length:]
        assert processor.tokenizer.decode(learned[learned != IGNORE]) == f"{answer}<|im_end|>"
    # of several answers, each is learned whole
    whole = processor.encode(talk("a", answer, "b <|im_end|>", answer), [])
    text = processor.tokenizer.decode(whole.labels[whole.labels != IGNORE])
    assert text == f"{answer}<|im_end|>" * 2


@pytest.mark.parametrize(("answers", "references"), [
    (None, ("Yes.",)), ("yes", ("Yes.", "yes")), (["Yes.", "Yes", "yep"], ("Yes.", "Yes", "yep")), ([], ("Yes.",))])
def test_a_row_may_have_several_answers(answers: Any, references: tuple[str, ...]) -> None:
    assert read_question(row(talk("Is it?", "Yes."), answers=answers), PROCESSOR, "").references == references


@pytest.mark.parametrize("answers", [3, {"text": "yes"}, ["yes", None]])
def test_answers_of_another_form(answers: Any) -> None:
    with pytest.raises(RowError, match=r"answers holds .*; allowed: a text, or a list of texts"):
        read_question(row(talk("Is it?", "Yes."), answers=answers), PROCESSOR, "")


def test_calls_of_tools_are_answers() -> None:
    """As the template writes them, beside what is said."""
    call = {"function": {"name": "zoom", "arguments": '{"factor": 2}'}}
    asked, said = talk("<image>?", "I look.")
    question = read_question(row([asked, said | {"tool_calls": [call]}], images=[picture(56, 56)]), PROCESSOR, "")
    assert question.references == (
        'I look.\n<tool_call>\n{"name": "zoom", "arguments": {"factor": 2}}\n</tool_call>',)
    labels = question.whole.labels
    assert PROCESSOR.tokenizer.decode(labels[labels != IGNORE]) == f"{question.references[0]}<|im_end|>"


@pytest.mark.parametrize("conversation", [talk("Hello?"), [], [{"from": "human", "value": "<image>"}]])
def test_a_row_without_an_answer(conversation: Any) -> None:
    with pytest.raises(RowError):
        read_question(row(conversation), PROCESSOR, "")


def test_the_references_of_a_whole_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.json", [
        {"id": "a", "conversations": talk("Is it?", "Yes.", "Sure?", "Yes, sure.")}, {"id": "b", "conversations": []},
        {"id": "c", "conversations": talk("Is it?", "No."), "answers": "nope"}])
    data = held_out(Data(format="llava"), str(path))
    assert read_references(index_fragments(data), 2**20, PROCESSOR) == {"a": ("Yes, sure.",), "c": ("No.", "nope")}


def test_answers_of_rows_above_the_limit_do_not_count(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.json", [{"id": "a", "conversations": talk("Is it?", "Yes.")},
                                               {"id": "b", "conversations": talk("Is it?" * 100, "No.")}])
    fragments = index_fragments(held_out(Data(format="llava"), str(path)))
    assert read_references(fragments, 400, PROCESSOR) == {"a": ("Yes.",)}
    check_answers(fragments, 400)
    with pytest.raises(DataError, match="none of the 2 samples has an answer"):
        check_answers(fragments, 10)


@pytest.mark.parametrize("ask", [partial(read_references, processor=PROCESSOR), check_answers])
def test_a_file_that_cannot_be_read_is_told(ask: Callable[[Fragments, int], object], tmp_path: Path) -> None:
    """Its answers would be missed once a model has answered."""
    path = write_rows(tmp_path / "rows.json", [{"id": "a", "conversations": talk("Is it?", "Yes.")}])
    fragments = index_fragments(held_out(Data(format="llava"), str(path)))
    path.unlink()
    with pytest.raises(DataError) as caught:
        ask(fragments, 2**20)
    assert str(caught.value) == f"data.path: {path} cannot be read: No such file or directory"


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet"])
def test_answers_come_with_the_rows_of_files(name: str, tmp_path: Path) -> None:
    rows = [{"id": "a", "conversations": talk("Is it?", "Yes."), "answers": ["yep"]}]
    path = tmp_path / name
    if path.suffix == ".json":
        write_rows(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    data = held_out(Data(format={"json": "llava", "parquet": "parquet"}[path.suffix[1:]]), str(path))
    [fragment] = index_fragments(data)
    [stored] = read_rows(fragment)
    assert read_question(stored, PROCESSOR, "").references == ("Yes.", "yep")
