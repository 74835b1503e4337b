"""What is asked of a model to evaluate it: of each conversation the last turn of the assistant, after all turns before
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from dhp_ray.data.conversation import last_answer, references_of, turns_of
from dhp_ray.data.errors import RowError
from dhp_ray.data.formats import read_texts
from dhp_ray.data.formats.stored_rows import Row, conversation_of
from dhp_ray.data.fragments import Fragment
from dhp_ray.data.processor import Encoded, Processor
from dhp_ray.data.reader import contents_of


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to be evaluated. `prompt` is what the answer is generated from, `prompt_text` the same before
    images take their tokens; `references` are the answers that count as right; `whole` is the conversation as it is
    trained on, with labels on every turn of the assistant.

    `images` are its encoded images and videos, in the order of the text; the prompt shows the first ones.
    """

    prompt_text: str
    prompt: Encoded
    references: tuple[str, ...]
    whole: Encoded
    images: list[bytes]


def question_of(row: Row, processor: Processor, image_root: str) -> Question:
    """The question that a row asks. Reads headers of its images, decodes no pixel.

    Raises:
        RowError: a row that cannot be used, also because the assistant says nothing in it.
    """
    turns, images, sizes = contents_of(row, processor, image_root)
    last = last_answer(turns)
    shown = sum(len(turn.media) for turn in turns[:last])
    text, prompt = processor.encode_prompt(turns[:last], sizes[:shown])
    return Question(text, prompt, references_of(row.fields, turns[last]), processor.encode_turns(turns, sizes), images)


def references_in(fragments: Iterable[Fragment]) -> dict[str, tuple[str, ...]]:
    """The answers that count as right, by the ids of rows; of those rows that have some and can be used.

    Raises:
        DataError: a file that cannot be read.
    """
    found = {}
    for fragment in fragments:
        for row in read_texts(fragment):
            with suppress(RowError):
                turns = turns_of(conversation_of(row.fields))
                found[row.id] = references_of(row.fields, turns[last_answer(turns)])
    return found
