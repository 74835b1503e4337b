"""The text and pixels of a model, family by family, as the family's own processor of transformers makes them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.media import MediaLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dhp_ray.planner.plan.types import Grid

MAX_ASPECT_RATIO = 200
MIN_PIXELS = 3136  # the fewest pixels of an image if the folder does not say: what transformers' processors have then
VIDEO_PIXELS = 25_165_824  # the most of all frames of a video if the folder does not say: as published of Qwen3-VL
SLICE_TOKENS = 1024
"""The most tokens of the entries into which a video is cut in time: members encode whole ones, and others wait."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as its container describes it: pixels of an upright frame, frames in all, frames a second on average.
    `times`: when each is shown, in seconds after the first, if not evenly spaced.
    """

    width: int
    height: int
    num_frames: int
    frames_per_second: float
    times: tuple[float, ...] = ()

    def middle_s(self, first: int, last: int) -> float:
        """The time in the middle between two frames, in seconds after the first frame of all."""
        if self.times:
            return (self.times[first] + self.times[last]) / 2
        return (first + last) / 2 / self.frames_per_second


Size = tuple[int, int] | Clip  # the size of an image, (width, height) in pixels, or of a video


class Medium(NamedTuple):
    """A whole image or video: patches (P, patch_dim), their grid, seconds of a step in time (0: an image)."""

    patches: np.ndarray
    grid: Grid
    seconds: float


class Written(NamedTuple):
    """How an image or video is written: the `text` in place of its mark, with a token for each of its `runs` of vision
    tokens (their lengths); the grids of its `pieces`; the `seconds` between steps in time of a video (0: an image).
    """

    text: str
    runs: Sequence[int]
    pieces: Sequence[Grid]
    seconds: float


@dataclass(frozen=True)
class Family:
    """A family's tokens, and how it turns images and videos into text and grids: here text-only. `settings`: of the
    image processor. An image has `min_pixels` to `max_pixels`; a frame of a video, or all of its frames if the family
    bounds them together, `min_video_pixels` or more; a frame at most `max_pixels`, and all frames `video_pixels`.
    """

    settings: Mapping[str, Any] = field(repr=False)
    min_pixels: int
    max_pixels: int
    limits: MediaLimits
    video_pixels: int = VIDEO_PIXELS
    min_video_pixels: int = MIN_PIXELS

    name: ClassVar[str]  # the `model_type` in config.json
    chat_template: ClassVar[str]  # of its presets
    tokens: ClassVar[Mapping[str, str]]  # by purpose: bos, eos, pad; image, video, vision_start, vision_end
    marks: ClassVar[Mapping[str, str]] = {}  # patterns of what the chat template writes for an image and a video
    special_tokens: ClassVar[Sequence[str]]  # of the byte-level tokenizer of its presets, in the order of their ids
    named_tokens: ClassVar[Mapping[str, str]] = {}  # those that its processor reads from attributes of the tokenizer
    structure_tokens: ClassVar[Sequence[str]]  # mark turns and images; a text that spells one does not mean it
    answer_end: ClassVar[str] = ""  # of which templates write none: the token that begins the turn behind an answer
    image_processors: ClassVar[tuple[str, ...]] = ()  # what the names of its image processors begin with
    image_settings: ClassVar[Mapping[str, Any]] = {}  # of the image processor, where a folder does not say otherwise
    frames_of_image: ClassVar[int] = 1  # as which an image counts in the bounds of pixels of its image processor

    @classmethod
    def byte_tokenizer(cls) -> PreTrainedTokenizerFast:
        """The tokenizer of its presets: a token for each byte, with its id; special tokens from 256 on."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                      for token in cls.special_tokens])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=cls.tokens["eos"], pad_token=cls.tokens["pad"],
            extra_special_tokens=list(cls.special_tokens[1:]), model_specific_special_tokens=dict(cls.named_tokens),
            chat_template=cls.chat_template, clean_up_tokenization_spaces=False, model_max_length=1 << 30)

    @classmethod
    def token_ids(cls, tokenizer: Any) -> dict[str, int]:
        """Ids of its tokens, by purpose. DataError: the tokenizer lacks one."""
        vocabulary = tokenizer.get_vocab()
        for token in cls.tokens.values():
            if token not in vocabulary:
                raise DataError(f"model.path: its tokenizer has no token {token}; allowed: a {cls.name} model whose "
                                f"tokenizer has {', '.join(dict.fromkeys(cls.tokens.values()))}")
        return {purpose: int(vocabulary[token]) for purpose, token in cls.tokens.items()}

    @property
    def merge_size(self) -> int:
        """Height and width of a token in patches."""
        return int(self.settings.get("merge_size", 1))

    def written(self, size: Size, slice_tokens: int = SLICE_TOKENS) -> Written:
        """How an image or video is written, in pieces of `slice_tokens` tokens or a step. RowError: it is refused."""
        raise RowError(f"{'a video' if isinstance(size, Clip) else 'an image'}; allowed: text, which is all that the "
                       "model takes")

    @classmethod
    def largest_image_tokens(cls, max_pixels: int, frame_pixels: int, token_pixels: int) -> int:
        """Vision tokens of the largest entry that one rank encodes: an image, or a piece of a video."""
        return 0

    @classmethod
    def model_settings(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings that a model's config.json holds, alone or beside the processor's files."""
        return {}

    @classmethod
    def plain(cls, name: str, value: Any) -> Any:
        """The value of a setting: some files have a pair of equal numbers instead of one number."""
        if not name.endswith("_size"):
            return value
        return int(value[0] if isinstance(value, (list, tuple)) and len(set(value)) == 1 else value)

    def processor_files(self) -> Mapping[str, Mapping[str, Any]]:
        """The files, by name, from which transformers makes the family's processor, beside its tokenizer."""
        return {}

    def model_inputs(self, media: Sequence[Medium]) -> dict[str, np.ndarray]:
        """What the model of transformers takes of the images and videos of one sequence, in the order of the text."""
        return {}


class VisionFamily(Family, ABC):
    """A family whose models take images and videos."""

    image_text: ClassVar[str]  # replaces an image's mark
    least_frames: ClassVar[int] = 1  # of a video that has as many
    merged_order: ClassVar[bool] = True  # the patches of one token are consecutive; otherwise they come row by row

    @property
    def patch_size(self) -> int:
        """Height and width of a patch in pixels."""
        return int(self.settings["patch_size"])

    @property
    def temporal_patch_size(self) -> int:
        """Frames in a patch."""
        return int(self.settings["temporal_patch_size"])

    @property
    def factor(self) -> int:
        """Height and width of a token in pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch: 3 colours x frames x height x width."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    @abstractmethod
    def image_processor(self) -> Any:
        """The image processor of transformers, on Pillow (imports torch)."""

    def image_patches(self, values: Any) -> np.ndarray:
        """The patches (P, patch_dim) from the `pixel_values` that the image processor makes of one image."""
        return np.asarray(values, np.float32)

    def written(self, size: Size, slice_tokens: int = SLICE_TOKENS) -> Written:
        grid = self.grid(size)
        if not isinstance(size, Clip):
            return Written(self.image_text, (math.prod(grid) // self.merge_size**2,), [grid], 0.0)
        steps, rows, columns = grid
        length = max(1, slice_tokens * self.merge_size**2 // (rows * columns))  # a video is cut in time
        return Written(self.video_text(size), self.video_runs(grid),
                       [(min(length, steps - first), rows, columns) for first in range(0, steps, length)],
                       self.temporal_patch_size * size.num_frames / (self.num_frames(size) * size.frames_per_second))

    def grid(self, size: Size) -> Grid:
        """Patches (time or tiles, height, width) of an image or of a whole video. RowError: the family refuses it."""
        if not isinstance(size, Clip):
            return self.image_grid(*size)
        rows, columns = self.frame_size(size)
        return (-(-self.num_frames(size) // self.temporal_patch_size), rows // self.patch_size,
                columns // self.patch_size)

    @classmethod
    def largest_image_tokens(cls, max_pixels: int, frame_pixels: int, token_pixels: int) -> int:
        return max(SLICE_TOKENS, max_pixels // token_pixels, cls.most_frame_pixels(frame_pixels) // token_pixels)

    @classmethod
    def most_frame_pixels(cls, max_pixels: int) -> int:
        """The most pixels of a frame if `max_pixels` are allowed."""
        return max_pixels

    @abstractmethod
    def image_grid(self, width: int, height: int) -> Grid:
        """As `grid`, of an image of this many pixels."""

    @abstractmethod
    def frame_size(self, clip: Clip) -> tuple[int, int]:
        """(height, width) in pixels to which the frames taken from a video are scaled."""

    def num_frames(self, clip: Clip) -> int:
        """The number of frames that are taken from a video."""
        wanted = int(clip.num_frames / clip.frames_per_second * self.limits.video_fps)
        return min(max(self.least_frames, wanted), self.limits.max_frames, clip.num_frames)

    @abstractmethod
    def frames(self, clip: Clip) -> list[int]:
        """The indices of the frames that are taken, ascending (may import torch)."""

    @abstractmethod
    def video_text(self, clip: Clip) -> str:
        """The text that replaces a video's mark; it has the token once for each run."""

    def video_runs(self, grid: Grid) -> Sequence[int]:
        """The vision tokens in each of the runs that a video has in the text: one for each step in time."""
        time, height, width = grid
        return (height * width // self.merge_size**2,) * time


def check_shape(height: int, width: int) -> None:
    """Refuse a picture whose longer side is more than 200 times its shorter side."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise RowError(f"an image of {width}x{height} pixels has the aspect ratio {ratio:g}; allowed: at most "
                       f"{MAX_ASPECT_RATIO}")


def patches(frames: np.ndarray, temporal_patch_size: int, patch_size: int, merge_size: int) -> np.ndarray:
    """Cut frames (T, 3, H, W) into patches (P, 3 x temporal_patch_size x patch_size x patch_size)."""
    time, channels, height, width = frames.shape
    cut = frames.reshape(time // temporal_patch_size, temporal_patch_size, channels, height // patch_size // merge_size,
                         merge_size, patch_size,
                         width // patch_size // merge_size, merge_size, patch_size)
    ordered = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(-1, channels * temporal_patch_size * patch_size**2)


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (as GPT-2 does)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
