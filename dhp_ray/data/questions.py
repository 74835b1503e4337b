"""The questions for evaluating a model: for each conversation, the last turn of the assistant, given all turns before
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
    """A conversation to evaluate. The answer is generated from `prompt`; `prompt_text` is its text before images take
    their tokens. `references` are the right answers. `whole` is the conversation as in training, with labels on every
    turn of the assistant that is learned.

    `images` are its encoded images and videos, in the order of the text; the prompt shows the first ones.
    """

    prompt_text: str
    prompt: Encoded
    references: tuple[str, ...]
    whole: Encoded
    images: list[bytes]


def question_of(row: Row, processor: Processor, image_root: str) -> Question:
    """The question of a row. Reads only the headers of its images (see `image_size`).

    Raises:
        RowError: the row cannot be used, for example because it has no turn of the assistant.
    """
    turns, images, sizes = contents_of(row, processor, image_root)
    last = last_answer(turns)
    shown = sum(len(turn.media) for turn in turns[:last])
    text, prompt = processor.encode_prompt(turns[:last], sizes[:shown])
    return Question(text, prompt, references_of(row.fields, turns[last]), processor.encode_turns(turns, sizes), images)


def references_in(fragments: Iterable[Fragment], max_bytes: int) -> dict[str, tuple[str, ...]]:
    """The right answers by row id, for the rows that have some and can be used, of at most `max_bytes`.

    Raises:
        DataError: a file cannot be read.
    """
    found = {}
    for fragment in fragments:
        for row in read_texts(fragment, max_bytes):
            with suppress(RowError):
                turns = turns_of(conversation_of(row.fields))
                found[row.id] = references_of(row.fields, turns[last_answer(turns)])
    return found
