"""Turns conversations into token ids, labels and grids, with the model's own tokenizer, chat template and image
processor.

This needs only the headers of images, because an image's tokens follow from its size. Nothing here imports torch until
`Processor.image_processor` is used.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dhp_ray.data.chat_template import ChatTemplate, HiddenTokens, SpelledTokens
from dhp_ray.data.conversation import Turn, check_counts, holds_any, offering, turns_of
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.families import family_of, folder_image_settings, preset_image_settings
from dhp_ray.data.families.base import SLICE_TOKENS, VIDEO_PIXELS, Bounds, Clip, Family, Size, grid_of, pieces_of
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.model_folder import chat_template_of, check_vocabulary, video_pixels_of, write_json
from dhp_ray.data.tokenizer import byte_tokenizer, special_token_ids
from dhp_ray.errors import first_line
from dhp_ray.planner.plan import Grid
from dhp_ray.schema import Data, Model

IGNORE = -100
MOST_TEXT = 2**22
"""Bytes of a row's text, about a million tokens: to tokenize more takes more memory than a task has. Bytes, because a
character may take as many tokens as bytes.
"""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sequence as the model sees it: int32 ids and labels of length L (labels are not shifted; -100 is masked), and
    the grids of its images.

    A long video has several grids, one after the other in time. For each grid, `media` is the index of its image or
    video in the text, and `seconds` is the duration of one step in time of a video (0: an image).
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
    """What a processor is loaded from; it is small, so it travels to actors instead of the processor."""

    preset: str = ""
    path: str = ""
    min_pixels: int = 3136
    max_pixels: int = 1003520
    limits: MediaLimits = field(default_factory=MediaLimits)

    @classmethod
    def of(cls, model: Model, data: Data) -> ProcessorSpec:
        return cls(model.preset, model.path, data.min_pixels, data.max_pixels, MediaLimits.of(data))

    def load(self) -> Processor:
        return load_processor(self.preset, self.path, self.min_pixels, self.max_pixels, self.limits)


@dataclass
class Processor:
    """A tokenizer with its chat template, and the sizes by which the image processor cuts patches."""

    family: Family
    tokenizer: Any
    chat_template: str
    image_settings: dict[str, Any] = field(repr=False)
    min_pixels: int
    max_pixels: int
    limits: MediaLimits = field(default_factory=MediaLimits)
    video_pixels: int = VIDEO_PIXELS

    def __post_init__(self) -> None:
        self.patch_size = int(self.image_settings["patch_size"])
        self.temporal_patch_size = int(self.image_settings["temporal_patch_size"])
        self.merge_size = int(self.image_settings["merge_size"])
        self.bounds = Bounds(self.patch_size, self.merge_size, self.min_pixels, self.max_pixels, self.video_pixels)
        self.token_ids = special_token_ids(self.tokenizer, self.family.tokens)
        named = (self.tokenizer.bos_token, self.tokenizer.eos_token, self.tokenizer.pad_token)
        self._spelled = SpelledTokens(self.tokenizer, (*self.family.structure_tokens, *named))
        self._template = ChatTemplate(self.tokenizer, self.chat_template)

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch: 3 colours x frames x height x width."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @cached_property
    def image_processor(self) -> Any:
        """The family's image processor, on Pillow (imports torch)."""
        return self.family.image_processor(self.image_settings, self.bounds)

    def num_frames(self, clip: Clip) -> int:
        """The number of frames that are taken from a video."""
        return self.family.num_frames(clip, self.limits, self.temporal_patch_size)

    def frames(self, clip: Clip) -> list[int]:
        """The indices of the frames that are taken, ascending (may import torch)."""
        return self.family.frames(clip, self.limits, self.temporal_patch_size)

    def frame_size(self, clip: Clip) -> tuple[int, int]:
        """(height, width) in pixels that each frame of a video is scaled to.

        Raises:
            RowError: a video that the family refuses.
        """
        return self.family.frame_size(clip, self.num_frames(clip), self.image_settings, self.bounds)

    def grid_of(self, size: Size) -> Grid:
        """Patches (time, height, width) of an image or of a whole video.

        Raises:
            RowError: an image or video that the family refuses.
        """
        return grid_of(self.family, size, self.image_settings, self.bounds, self.limits)

    def turns(self, conversation: Sequence[Mapping[str, Any]], tools: Any = None) -> list[Turn]:
        """The turns of a conversation. `tools` are those that the assistant may call.

        Raises:
            RowError: roles, texts or tools cannot be encoded.
        """
        turns = turns_of(conversation)
        return offering(turns, tools, self._template.default_system) if holds_any(tools) else turns

    def encode(self, conversation: Sequence[Mapping[str, Any]], sizes: Sequence[Size]) -> Encoded:
        """Ids, labels and grids of a conversation whose marks stand for images and videos of these sizes, in this
        order.

        Labels are the ids of the assistant's turns that are learned, with their end token, and -100 elsewhere.

        Raises:
            RowError: roles, marks or texts cannot be encoded.
        """
        turns = self.turns(conversation)
        check_counts(turns, Counter(_kind(size) for size in sizes))
        return self.encode_turns(turns, sizes)

    def encode_turns(self, turns: Sequence[Turn], sizes: Sequence[Size], slice_tokens: int = SLICE_TOKENS) -> Encoded:
        """Like `encode`, for turns whose marks have been counted. A grid of a video has at most `slice_tokens` tokens,
        or one step in time.
        """
        hidden = self._spelled.hide(turns)
        return self._encode(*self._template.render(hidden.turns), hidden, sizes, slice_tokens)

    def encode_prompt(
        self, turns: Sequence[Turn], sizes: Sequence[Size], slice_tokens: int = SLICE_TOKENS
    ) -> tuple[str, Encoded]:
        """The prompt for the assistant's next turn: the template's text, and its encoding as by `encode_turns`, without
        labels.
        """
        hidden = self._spelled.hide(turns)
        text = self._template.prompt(hidden.turns)
        return hidden.shown(text), self._encode(text, [], hidden, sizes, slice_tokens)

    def _encode(self, text: str, spans: Sequence[tuple[int, int]], hidden: HiddenTokens, sizes: Sequence[Size],
                slice_tokens: int) -> Encoded:
        if (num_bytes := len(text.encode())) > MOST_TEXT:
            raise RowError(f"{num_bytes} bytes of text; allowed: at most {MOST_TEXT}")
        whole = [self.grid_of(size) for size in sizes]
        pieces = [piece for number, (size, grid) in enumerate(zip(sizes, whole))
                  for piece in self._pieces(number, size, grid, slice_tokens)]
        runs = [(_kind(size), count) for size, grid in zip(sizes, whole) for count in self._runs(size, grid)]
        text, spans = self._with_media(text, spans, sizes)
        ids, starts, stops = self._spelled.encode(text, hidden)
        labels = np.where(within(starts, stops, spans), ids, np.int32(IGNORE))
        # The text has one token per run; the model takes one per merged patch.
        marks = (ids == self.token_ids["image"]) | (ids == self.token_ids["video"])
        if ids[marks].tolist() != [self.token_ids[kind] for kind, _ in runs]:
            raise RowError(f"{int(marks.sum())} runs of image and video tokens; allowed: {len(runs)}")
        counts = np.array([count for _, count in runs], np.int64)
        repeats = np.ones_like(ids)
        repeats[marks] = counts
        return Encoded(np.repeat(ids, repeats), np.repeat(labels, repeats), tuple(grid for grid, _, _ in pieces),
                       int(counts.sum()), tuple(number for _, number, _ in pieces),
                       tuple(seconds for _, _, seconds in pieces))

    def _runs(self, size: Size, grid: Grid) -> Sequence[int]:
        """The number of vision tokens in each of the runs that an image or video has in the text."""
        if isinstance(size, Clip):
            return self.family.video_runs(grid, self.merge_size**2)
        return (math.prod(grid) // self.merge_size**2,)

    def _with_media(
        self, text: str, spans: Sequence[tuple[int, int]], sizes: Sequence[Size]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text with the template's marks replaced by what the family writes for each image and video, and the
        shifted spans.

        Raises:
            RowError: the marks are not those of these images and videos.
        """
        found = list(re.finditer("|".join(f"(?P<{kind}>{mark})" for kind, mark in self.family.marks.items()), text))
        if [mark.lastgroup for mark in found] != [_kind(size) for size in sizes]:
            raise RowError(
                f"{len(found)} image and video tokens after the chat template, for {len(sizes)} images and videos, or "
                "in another order"
            )
        written = [self.family.video_text(size, self.limits, self.temporal_patch_size) if isinstance(size, Clip)
                   else self.family.image_text() for size in sizes]
        pieces, stop = [], 0
        for mark, new in zip(found, written):
            pieces += [text[stop : mark.start()], new]
            stop = mark.end()
        grown = np.cumsum([0, *(len(new) - len(mark[0]) for mark, new in zip(found, written))])
        before = np.searchsorted([mark.start() for mark in found], [start for start, _ in spans])
        return ("".join([*pieces, text[stop:]]),
                [(start + shift, stop + shift) for (start, stop), shift in zip(spans, grown[before].tolist())])

    def _pieces(self, number: int, size: Size, grid: Grid, slice_tokens: int) -> list[tuple[Grid, int, float]]:
        """(grid, index, seconds of a step) of each entry into which an image or video is cut."""
        seconds = (self.family.seconds_per_step(size, self.limits, self.temporal_patch_size)
                   if isinstance(size, Clip) else 0.0)
        return [(piece, number, seconds) for piece in pieces_of(size, grid, self.merge_size**2, slice_tokens)]

    def save(self, folder: str | Path) -> None:
        """Write every file that `AutoProcessor`, `AutoTokenizer` and `AutoImageProcessor` read from a model's folder.
        """
        target = Path(folder)
        self.tokenizer.chat_template = self.chat_template
        self.tokenizer.save_pretrained(str(target))
        for name, tree in self.family.processor_files(self.image_settings, self.bounds, self.limits).items():
            write_json(target / name, dict(tree))
        # Older readers find the template only in this file.
        write_json(target / "chat_template.json", {"chat_template": self.chat_template})


def load_processor(
    preset: str, path: str, min_pixels: int, max_pixels: int, limits: MediaLimits | None = None
) -> Processor:
    """The processor of a preset (byte-level tokenizer), or of the model in a local folder.

    Raises:
        DataError: the folder lacks a file, or is of an unknown family.
    """
    limits, folder = limits or MediaLimits(), Path(path)
    if not preset and not folder.is_dir():
        raise DataError(f"model.path: no folder {path}")
    family = family_of(preset, path)
    if preset:
        of_bytes = byte_tokenizer(family.special_tokens, family.chat_template, family.named_tokens)
        return Processor(family, of_bytes, family.chat_template, preset_image_settings(preset), min_pixels,
                         max_pixels, limits)
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers reads config.json too, whose checks of values raise errors of many kinds
        raise DataError(f"model.path: {path} has no tokenizer that loads: {first_line(error)}") from None
    if not tokenizer.is_fast:
        raise DataError(f"model.path: {path} has no fast tokenizer; allowed: a folder with tokenizer.json")
    check_vocabulary(folder, tokenizer.get_vocab().values())
    template = chat_template_of(folder)
    try:
        settings = folder_image_settings(folder, family)
        return Processor(family, tokenizer, template, settings, min_pixels, max_pixels, limits,
                         video_pixels_of(folder) or VIDEO_PIXELS)
    except TemplateError as error:
        raise DataError(f"model.path: {path}: its chat template cannot be used: {first_line(error)}") from None


def within(starts: np.ndarray, stops: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """(L,) whether each token, which begins and ends at these characters, has some and all of them lie in one of the
    spans. The spans are ascending and do not overlap.
    """
    begins, ends = np.array([(-1, -1), *spans], np.int64).T
    return (stops > starts) & (stops <= ends[np.searchsorted(begins, starts, side="right") - 1])


def _kind(size: Size) -> str:
    return "video" if isinstance(size, Clip) else "image"
