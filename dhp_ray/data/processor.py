"""Conversations to token ids, labels and grids, by the model's own tokenizer, chat template and image processor.

Only headers of images are needed here: every image's tokens follow from its size. Nothing here imports torch
until `Processor.image_processor` is asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dhp_ray.data.chat_template import ChatTemplate
from dhp_ray.data.clip import MIN_FRAMES, Clip
from dhp_ray.data.conversation import Turn, check_counts, offering, turns_of
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.media import MediaLimits
from dhp_ray.data.model_folder import PRESET_IMAGE_SETTINGS, chat_template_of, folder_image_settings, write_json
from dhp_ray.data.tokenizer import CHAT_TEMPLATE, STRUCTURE_TOKENS, byte_tokenizer, special_token_ids
from dhp_ray.data.tools import holds_any
from dhp_ray.errors import first_line
from dhp_ray.planner.plan import Grid
from dhp_ray.schema import Data, Model

IGNORE = -100
MAX_ASPECT_RATIO = 200
SLICE_TOKENS = 4096
"""A longer video is cut in time into entries of at most so many tokens, for several members to encode: a frame pair's
patches see no other's.
"""

Size = tuple[int, int] | Clip
"""Of an image (width, height) in pixels, or of a video."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sequence as the model sees it: ids and labels int32 of length L (labels unshifted, -100 masked), grids of its
    images.

    A long video has several grids, one after the other in time. For each grid, `media` is the number of its image or
    video in the text, and `seconds` is what one step in time of a video lasts; 0 for an image.
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
    """What a processor is loaded from; small, so that it travels to actors in place of the processor."""

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

    tokenizer: Any
    chat_template: str
    image_settings: dict[str, Any] = field(repr=False)
    min_pixels: int
    max_pixels: int
    limits: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        self.patch_size = int(self.image_settings.get("patch_size", 14))
        self.temporal_patch_size = int(self.image_settings.get("temporal_patch_size", 2))
        self.merge_size = int(self.image_settings.get("merge_size", 2))
        self.token_ids = special_token_ids(self.tokenizer)
        present = set(self.tokenizer.get_vocab())
        named = (self.tokenizer.bos_token, self.tokenizer.eos_token, self.tokenizer.pad_token)
        reserved = dict.fromkeys((*STRUCTURE_TOKENS, *named))
        self._reserved = tuple(token for token in reserved if token and token in present)
        self._template = ChatTemplate(self.tokenizer, self.chat_template)

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch: 3 colours x frames x height x width."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @cached_property
    def image_processor(self) -> Any:
        """The image processor of the Qwen2-VL family, on Pillow (imports torch)."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        settings = {name: value for name, value in self.image_settings.items()
                    if name not in ("size", "min_pixels", "max_pixels")}
        return Qwen2VLImageProcessorPil(**settings,
                                        size={"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels})

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) in pixels that an image or a frame of this many pixels is scaled to.

        Raises:
            RowError: it is more than 200 times as long as it is wide.
        """
        return smart_resize(height, width, self.patch_size * self.merge_size, self.min_pixels, self.max_pixels)

    def grid_of(self, width: int, height: int) -> Grid:
        """Patches (time, height, width) of an image of this many pixels."""
        rows, columns = self.resized(width, height)
        return (1, rows // self.patch_size, columns // self.patch_size)

    def turns(self, conversation: Sequence[Mapping[str, Any]], tools: Any = None) -> list[Turn]:
        """The turns of a conversation, whose texts spell no special token. `tools` are those that the assistant may
        call.

        Raises:
            RowError: roles, texts or tools that cannot be encoded.
        """
        turns = turns_of(conversation, self._reserved)
        return offering(turns, tools, self._template.default_system, self._reserved) if holds_any(tools) else turns

    def encode(self, conversation: Sequence[Mapping[str, Any]], sizes: Sequence[Size]) -> Encoded:
        """Ids, labels and grids of a conversation whose marks stand for images and videos of these sizes, in their
        order.

        Labels are the ids of the assistant's turns with their end token, and -100 elsewhere.

        Raises:
            RowError: roles, marks or texts that cannot be encoded.
        """
        turns = self.turns(conversation)
        check_counts(turns, Counter(_kind(size) for size in sizes))
        return self.encode_turns(turns, sizes)

    def encode_turns(self, turns: Sequence[Turn], sizes: Sequence[Size], slice_tokens: int = SLICE_TOKENS) -> Encoded:
        """As `encode`, of turns whose marks have been counted. A grid of a video has at most `slice_tokens` tokens, or
        one step in time.
        """
        pieces = [piece for number, size in enumerate(sizes) for piece in self._pieces(number, size, slice_tokens)]
        grids = tuple(grid for grid, _, _ in pieces)
        counts = np.bincount([number for _, number, _ in pieces],
                             [math.prod(grid) // self.merge_size**2 for grid in grids], len(sizes)).astype(np.int64)
        text, spans = self._template.render(turns)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True,
                                  return_attention_mask=False)
        ids = np.asarray(encoding["input_ids"], np.int32)
        starts, stops = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2).T
        labels = np.full_like(ids, IGNORE)
        for start, stop in spans:
            inside = (starts >= start) & (stops <= stop) & (stops > starts)
            labels[inside] = ids[inside]
        # The template writes one token an image or video; the model wants one for every merged patch.
        marks = (ids == self.token_ids["image"]) | (ids == self.token_ids["video"])
        if ids[marks].tolist() != [self.token_ids[_kind(size)] for size in sizes]:
            raise RowError(
                f"{int(marks.sum())} image and video tokens after the chat template, for {len(sizes)} images and "
                "videos, or in another order"
            )
        repeats = np.ones_like(ids)
        repeats[marks] = counts
        return Encoded(np.repeat(ids, repeats), np.repeat(labels, repeats), grids, int(counts.sum()),
                       tuple(number for _, number, _ in pieces), tuple(seconds for _, _, seconds in pieces))

    def _pieces(self, number: int, size: Size, slice_tokens: int) -> list[tuple[Grid, int, float]]:
        """(grid, number, seconds a step) of each entry that an image or video becomes."""
        if not isinstance(size, Clip):
            return [(self.grid_of(*size), number, 0.0)]
        _, rows, columns = self.grid_of(size.width, size.height)
        steps = -(-size.num_sampled(self.limits, self.temporal_patch_size) // self.temporal_patch_size)
        length = max(1, slice_tokens * self.merge_size**2 // (rows * columns))
        seconds = size.seconds_per_step(self.limits, self.temporal_patch_size)
        return [((min(length, steps - first), rows, columns), number, seconds) for first in range(0, steps, length)]

    def save(self, folder: str | Path) -> None:
        """Write every file that `AutoProcessor`, `AutoTokenizer` and `AutoImageProcessor` read from a model's folder.
        """
        target = Path(folder)
        self.tokenizer.chat_template = self.chat_template
        self.tokenizer.save_pretrained(str(target))
        settings = {name: value for name, value in self.image_settings.items()
                    if name not in ("min_pixels", "max_pixels")}
        size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        processor = {"processor_class": "Qwen2_5_VLProcessor"}
        write_json(target / "preprocessor_config.json",
                   settings | processor | {"image_processor_type": "Qwen2VLImageProcessor", "size": size})
        sampling = {"do_sample_frames": True, "fps": self.limits.video_fps, "min_frames": MIN_FRAMES,
                    "max_frames": self.limits.max_frames,
                    "cap_pixels_per_frame": False}
        video = settings | processor | sampling | {"video_processor_type": "Qwen2VLVideoProcessor", "size": size}
        write_json(target / "video_preprocessor_config.json",
                   {name: value for name, value in video.items() if name != "image_processor_type"})
        write_json(target / "processor_config.json", processor)
        # Older readers know the template by this file only.
        write_json(target / "chat_template.json", {"chat_template": self.chat_template})


def load_processor(
    preset: str, path: str, min_pixels: int, max_pixels: int, limits: MediaLimits | None = None
) -> Processor:
    """The processor of a preset (byte-level tokenizer), or of the model in a local folder.

    Raises:
        DataError: the folder lacks a file, or is not of the Qwen2-VL family.
    """
    limits = limits or MediaLimits()
    if preset:
        return Processor(byte_tokenizer(), CHAT_TEMPLATE, dict(PRESET_IMAGE_SETTINGS), min_pixels, max_pixels, limits)
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"model.path: no folder {path}")
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"model.path: {path} has no tokenizer that loads: {first_line(error)}") from None
    if not tokenizer.is_fast:
        raise DataError(f"model.path: {path} has no fast tokenizer; allowed: a folder with tokenizer.json")
    template = chat_template_of(folder)
    try:
        return Processor(tokenizer, template, folder_image_settings(folder), min_pixels, max_pixels, limits)
    except TemplateError as error:
        raise DataError(f"model.path: {path}: its chat template cannot be used: {first_line(error)}") from None


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in multiples of `factor`, near the picture's shape, with pixels between the bounds (Qwen2-VL,
    section 2.1).

    Raises:
        RowError: the aspect ratio is above 200.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise RowError(
            f"an image of {width}x{height} pixels has the aspect ratio {ratio:g}; allowed: at most {MAX_ASPECT_RATIO}"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns


def _kind(size: Size) -> str:
    return "video" if isinstance(size, Clip) else "image"
