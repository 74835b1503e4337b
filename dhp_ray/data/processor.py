"""Turns conversations into token ids, labels and grids, with the model's own tokenizer, chat template and image
processor. Tokens follow from images' headers; nothing here imports torch until `Family.image_processor` is used.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from dhp_ray.data.chat_template import WORDS, ChatTemplate, HiddenTokens, SpelledTokens
from dhp_ray.data.conversation import Turn, check_counts, last_answer, read_turns, right_answers
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.families import PRESET_SETTINGS, PRESETS
from dhp_ray.data.families.base import MIN_PIXELS, SLICE_TOKENS, VIDEO_PIXELS, Clip, Family, Size, Written
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.model_folder import (
    chat_template,
    check_processor_files,
    check_vocabulary,
    family_in,
    image_settings,
    least_pixels,
    video_pixels,
    write_json,
)
from dhp_ray.errors import first_line
from dhp_ray.planner.plan.types import Grid
from dhp_ray.schema import Data, Model

IGNORE = -100
MOST_TEXT = 2**22  # bytes of a row's text, of which each may be a token: a task has no memory to tokenize more
TOKENIZER_PATTERNS = ("tokenizer*.json", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json",
                      "added_tokens.json", "chat_template.*")
"""Files of a folder's tokenizer and chat template."""


class Encoded(NamedTuple):
    """A sequence as the model sees it: int32 ids and labels (L,) (not shifted; -100 is masked), the grids of its images
    and pieces of videos, and of each the number of its medium and the seconds of a step in time (0: an image).
    """

    input_ids: np.ndarray
    labels: np.ndarray
    grids: tuple[Grid, ...]
    vision_tokens: int
    media: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def text_tokens(self) -> int:
        return len(self.input_ids) - self.vision_tokens


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    """What a processor is loaded from; small enough to travel. `min_pixels` 0: those of the folder's processors."""

    preset: str = ""
    path: str = ""
    min_pixels: int = 0
    max_pixels: int = 1003520
    limits: MediaLimits = field(default_factory=MediaLimits)

    @classmethod
    def of(cls, model: Model, data: Data) -> ProcessorSpec:
        return cls(model.preset, model.path, data.min_pixels, data.max_pixels, MediaLimits.of(data))

    def load(self) -> Processor:
        """The processor of a preset, or of a folder. DataError: that lacks a file, or is of no known family."""
        if self.preset:
            kind = PRESETS[self.preset]
            least = self.min_pixels or min(MIN_PIXELS, self.max_pixels)
            family = kind({**kind.image_settings, **PRESET_SETTINGS.get(self.preset, {})}, least, self.max_pixels,
                          self.limits, min_video_pixels=least)
            return Processor(family, kind.byte_tokenizer(), kind.chat_template)
        from transformers import AutoTokenizer

        folder = Path(self.path)
        if not folder.is_dir():
            raise DataError(f"model.path: no folder {self.path}")
        kind = family_in(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # it reads config.json too, whose checks of values raise errors of many kinds
            raise DataError(f"model.path: {folder} has no tokenizer that loads: {first_line(error)}") from None
        if not tokenizer.is_fast:
            raise DataError(f"model.path: {folder} has no fast tokenizer; allowed: a folder with tokenizer.json")
        _keep_spaces(tokenizer.backend_tokenizer)
        check_vocabulary(folder, tokenizer.get_vocab().values())
        template = chat_template(folder)
        image, video = least_pixels(folder)
        of_image, of_video = (self.min_pixels or min(least, self.max_pixels)
                              for least in (image // kind.frames_of_image, video))
        family = kind(image_settings(folder, kind), of_image, self.max_pixels, self.limits,
                      video_pixels(folder) or VIDEO_PIXELS, of_video)
        try:
            return Processor(family, tokenizer, template, folder)
        except TemplateError as error:
            raise DataError(f"model.path: {folder}: its chat template cannot be used: {first_line(error)}") from None


@dataclass
class Processor:
    """A model's tokenizer and chat template, and its family. `folder`: the model's; None: a preset's."""

    family: Family
    tokenizer: Any
    chat_template: str
    folder: Path | None = None

    def __post_init__(self) -> None:
        self.token_ids = self.family.token_ids(self.tokenizer)
        named = (self.tokenizer.bos_token, self.tokenizer.eos_token, self.tokenizer.pad_token)
        self._spelled = SpelledTokens(self.tokenizer, (*self.family.structure_tokens, *named))
        self._template = ChatTemplate(self.tokenizer, self.chat_template, self.family.answer_end)

    def encode(self, conversation: Sequence[Mapping[str, Any]], sizes: Sequence[Size]) -> Encoded:
        """Ids, labels and grids of a conversation whose marks stand for images and videos of these sizes, in order.
        Labels are the ids of learned answers, with their end token, else -100. RowError: it cannot be encoded.
        """
        turns = read_turns(conversation)
        check_counts(turns, Counter(_kind(size) for size in sizes))
        return self.encode_turns(turns, sizes)

    def encode_turns(self, turns: Sequence[Turn], sizes: Sequence[Size], slice_tokens: int = SLICE_TOKENS) -> Encoded:
        """Like `encode`, of counted marks; a video's grids have at most `slice_tokens` tokens, or one step."""
        media = [self.family.written(size, slice_tokens) for size in sizes]
        hidden = self._spelled.hide(turns)
        return self._encode(*self._template.render(hidden.turns), hidden, sizes, media)

    def encode_prompt(
        self, turns: Sequence[Turn], sizes: Sequence[Size], slice_tokens: int = SLICE_TOKENS
    ) -> tuple[str, Encoded]:
        """The prompt for the assistant's next turn: its text, and its encoding, without labels."""
        media = [self.family.written(size, slice_tokens) for size in sizes]
        hidden = self._spelled.hide(turns)
        text = self._template.prompt(hidden.turns)
        return hidden.shown(text), self._encode(text, [], hidden, sizes, media)

    def end_ids(self, named: int | Sequence[int] | None) -> list[int]:
        """The tokens that end an answer: those `named` by a model's settings, and the end of a turn."""
        others = [] if named is None else [named] if isinstance(named, int) else named
        return sorted({self.token_ids["eos"], *others})

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of generated ids, as `references` write it: without special tokens but for those that are said."""
        control = {number for number, token in self.tokenizer.added_tokens_decoder.items()
                   if token.special and token.content not in WORDS}
        text: str = self.tokenizer.decode([number for number in ids if number not in control])
        return text

    def references(self, fields: Mapping[str, Any], turns: Sequence[Turn]) -> tuple[str, ...]:
        """The right answers of a row, as evaluation compares them with what the model generates."""
        last = last_answer(turns)
        return right_answers(fields, self._template.answer(last + 1, turns[last]))

    def _encode(self, text: str, spans: Sequence[tuple[int, int]], hidden: HiddenTokens, sizes: Sequence[Size],
                media: Sequence[Written]) -> Encoded:
        if (num_bytes := len(text.encode())) > MOST_TEXT:
            raise RowError(f"{num_bytes} bytes of text; allowed: at most {MOST_TEXT}")
        pieces = [(piece, number, medium.seconds) for number, medium in enumerate(media) for piece in medium.pieces]
        runs = [(_kind(size), count) for size, medium in zip(sizes, media) for count in medium.runs]
        text, spans = self._with_media(text, spans, sizes, [medium.text for medium in media])
        ids, starts, stops = self._spelled.encode(text, hidden, [start for start, _ in spans])
        labels = np.where(within(starts, stops, spans), ids, np.int32(IGNORE))
        # The text has one token per run; the model takes one per merged patch.
        marks = np.isin(ids, [self.token_ids[kind] for kind in self.family.marks])
        if ids[marks].tolist() != [self.token_ids[kind] for kind, _ in runs]:
            raise RowError(f"{int(marks.sum())} runs of image and video tokens; allowed: {len(runs)}")
        counts = np.array([count for _, count in runs], np.int64)
        repeats = np.ones_like(ids)
        repeats[marks] = counts
        return Encoded(np.repeat(ids, repeats), np.repeat(labels, repeats), tuple(grid for grid, _, _ in pieces),
                       int(counts.sum()), tuple(number for _, number, _ in pieces),
                       tuple(seconds for _, _, seconds in pieces))

    def _with_media(
        self, text: str, spans: Sequence[tuple[int, int]], sizes: Sequence[Size], written: Sequence[str]
    ) -> tuple[str, Sequence[tuple[int, int]]]:
        """The text with what is `written` in place of the template's marks, and the shifted spans."""
        if not self.family.marks:
            return text, spans
        found = list(re.finditer("|".join(f"(?P<{kind}>{mark})" for kind, mark in self.family.marks.items()), text))
        if [mark.lastgroup for mark in found] != [_kind(size) for size in sizes]:
            raise RowError(f"{len(found)} image and video tokens after the chat template, for {len(sizes)} images and "
                           "videos, or in another order")
        pieces, stop = [], 0
        for mark, new in zip(found, written):
            pieces += [text[stop : mark.start()], new]
            stop = mark.end()
        grown = np.cumsum([0, *(len(new) - len(mark[0]) for mark, new in zip(found, written))])
        before = np.searchsorted([mark.start() for mark in found], [start for start, _ in spans])
        return ("".join([*pieces, text[stop:]]),
                [(start + shift, stop + shift) for (start, stop), shift in zip(spans, grown[before].tolist())])

    def save(self, folder: str | Path) -> None:
        """Write the files that transformers reads processor, tokenizer and image processor from: of a model's folder
        those of the tokenizer as they are, but for a byte order mark. DataError: that folder is gone.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        if self.folder is not None:
            check_processor_files(self.folder)
            for file in (file for pattern in TOKENIZER_PATTERNS for file in self.folder.glob(pattern)):
                (target / file.name).write_bytes(file.read_bytes().removeprefix(codecs.BOM_UTF8))
        else:
            self.tokenizer.chat_template = self.chat_template
            try:
                self.tokenizer.save_pretrained(str(target))
            except Exception as error:
                if type(error) is not Exception:
                    raise
                raise OSError(first_line(error)) from None  # what tokenizers raises where it cannot write
            # Older readers find the template only in this file.
            write_json(target / "chat_template.json", {"chat_template": self.chat_template})
        for name, tree in self.family.processor_files().items():
            write_json(target / name, dict(tree))


def within(starts: np.ndarray, stops: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """(L,) whether a token has characters, all of them in one of the ascending spans."""
    begins, ends = np.array([(-1, -1), *spans], np.int64).T
    return (stops > starts) & (stops <= ends[np.searchsorted(begins, starts, side="right") - 1])


def _keep_spaces(tokenizer: Any) -> None:
    """Let the offsets of tokens include their spaces, by which labels are found."""
    if last := tokenizer.post_processor:
        last.__setstate__(last.__getstate__().replace(b'"trim_offsets":true', b'"trim_offsets":false'))
        tokenizer.post_processor = last


def _kind(size: Size) -> str:
    return "video" if isinstance(size, Clip) else "image"
