"""What is asked of a model to evaluate it: of each conversation the last turn of the assistant, after all turns before
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dhp_ray.data.conversation import Turn
from dhp_ray.data.errors import RowError
from dhp_ray.data.formats.stored_rows import Row
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
    last = max(number for number, turn in enumerate(turns) if turn.role == "assistant")
    shown = sum(len(turn.media) for turn in turns[:last])
    text, prompt = processor.encode_prompt(turns[:last], sizes[:shown])
    return Question(text, prompt, references_of(row, turns[last]), processor.encode_turns(turns, sizes), images)


def references_of(row: Row, answer: Turn) -> tuple[str, ...]:
    """The assistant's own answer, and what the row's `answers` has beside it.

    Raises:
        RowError: `answers` holds something else than texts.
    """
    others: Any = row.fields.get("answers")
    others = [] if others is None else [others] if isinstance(others, str) else others
    if not isinstance(others, list) or not all(isinstance(text, str) for text in others):
        raise RowError(f"answers holds {str(others)[:80]!r}; allowed: a text, or a list of texts")
    return tuple(dict.fromkeys((answer.text.strip(), *others)))
