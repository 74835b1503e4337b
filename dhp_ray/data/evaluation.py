"""Evaluation: a conversation's last answer, given all turns before it, is scored by exact match and token F1 as SQuAD
defines them, and by ANLS, between 0 and 1; of several references the best one counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import numpy as np

from dhp_ray.data.chat_template import split_thought
from dhp_ray.data.conversation import last_answer, read_turns, stored_turns
from dhp_ray.data.errors import RowError
from dhp_ray.data.formats import read_texts
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.fragments import Fragment
from dhp_ray.data.processor import Encoded, Processor
from dhp_ray.data.reader import read_contents

ANLS_THRESHOLD = 0.5
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation to evaluate: the `prompt` for an answer, right answers, and the `whole` as in training. `images`:
    those of the whole, encoded, in order; the prompt shows the first ones.
    """

    prompt_text: str
    prompt: Encoded
    references: tuple[str, ...]
    whole: Encoded
    images: list[bytes]


def read_question(row: Row, processor: Processor, image_root: str) -> Question:
    """The question of a row, of whose images only headers are read. RowError: it cannot be used."""
    turns, images, sizes = read_contents(row, processor, image_root)
    last = last_answer(turns)
    shown = sum(len(turn.media) for turn in turns[:last])
    text, prompt = processor.encode_prompt(turns[:last], sizes[:shown])
    return Question(text, prompt, processor.references(row.fields, turns), processor.encode_turns(turns, sizes), images)


def read_references(fragments: Iterable[Fragment], max_bytes: int, processor: Processor) -> dict[str, tuple[str, ...]]:
    """The right answers by id, of rows that can be used, of at most `max_bytes`. DataError: a file cannot be read."""
    found = {}
    for fragment in fragments:
        for row in read_texts(fragment, max_bytes):
            with suppress(RowError):
                found[row.id] = processor.references(row.fields, read_turns(stored_turns(row.fields)))
    return found


class Scores(NamedTuple):
    """The scores of one answer, or sums over several answers."""

    exact_match: float
    anls: float
    f1: float


def score(prediction: str, references: Sequence[str]) -> Scores:
    """All scores of an answer, each with the reference that gives the highest one; thoughts do not count."""
    said, *right = (split_thought(text)[1] for text in (prediction, *references))

    def best(score: Callable[[str, str], float]) -> float:
        return max(score(said, reference) for reference in right)

    return Scores(best(exact_match), best(anls), best(token_f1))


class MeanScores:

    def __init__(self) -> None:
        self._count, self._sums = 0, Scores(0.0, 0.0, 0.0)

    def add(self, scores: Scores) -> None:
        self._count += 1
        self._sums = Scores(*map(add, self._sums, scores))

    def by_name(self) -> dict[str, float]:
        """The means by name; empty if no answer has been scored."""
        return {name: total / self._count for name, total in self._sums._asdict().items()} if self._count else {}


def exact_match(prediction: str, reference: str) -> float:
    """1 if both are equal after normalisation (SQuAD, arXiv 1606.05250, section 6.1), else 0."""
    return float(normalised(prediction) == normalised(reference))


def token_f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words (SQuAD, section 6.1); of texts without words as in SQuAD 2.0."""
    found, wanted = normalised(prediction).split(), normalised(reference).split()
    if not found or not wanted:
        return float(found == wanted)
    return 2 * sum((Counter(found) & Counter(wanted)).values()) / (len(found) + len(wanted))


def anls(prediction: str, reference: str) -> float:
    """Normalised Levenshtein similarity, without case and white space; 0 up to ANLS_THRESHOLD (1907.00490, 4.2)."""
    found, wanted = (" ".join(text.lower().split()) for text in (prediction, reference))
    distance = edit_distance(found, wanted) / max(1, len(found), len(wanted))
    return 1.0 - distance if distance < ANLS_THRESHOLD else 0.0


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, with one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def edit_distance(first: str, second: str) -> int:
    """The fewest insertions, deletions and replacements of a character between two texts (Levenshtein)."""
    letters, places = _characters(second), np.arange(len(second) + 1)
    row = places.copy()
    for letter in _characters(first):
        replaced = np.minimum(row[1:] + 1, row[:-1] + (letters != letter))
        row = np.minimum.accumulate(np.concatenate([row[:1] + 1, replaced]) - places) + places
    return int(row[-1])


def _characters(text: str) -> np.ndarray:
    """(length,): the number of each character, single surrogates of UTF-16 included, which JSON may hold."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
