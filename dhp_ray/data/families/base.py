"""The text and pixels of a model, family by family, as the family's own processor of transformers makes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from dhp_ray.data.errors import RowError
from dhp_ray.data.media import MediaLimits

if TYPE_CHECKING:
    from dhp_ray.planner.plan import Grid  # the planner imports numba

MAX_ASPECT_RATIO = 200
VIDEO_PIXELS = 25_165_824
"""The most pixels of all frames of a video, if the family bounds them and the folder does not say: the published value
of Qwen3-VL.
"""
SLICE_TOKENS = 1024
"""The most tokens of an entry into which a longer video is cut in time, so that several members can encode it: patches
of a frame pair attend only to each other. Members encode whole entries, so large entries leave members waiting
(benchmarks/scale.py slices).
"""


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as its container describes it: pixels of an upright frame, frames in all, frames a second on average.

    `times`: when each frame is shown, in seconds after the first, if the frames are not evenly spaced.
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


Size = tuple[int, int] | Clip
"""The size of an image, (width, height) in pixels, or of a video."""


class Bounds(NamedTuple):
    """How an image or a frame is cut: patches of `patch_size` x `patch_size` pixels, `merge_size` x `merge_size` of
    which make a token, and between `minimum` and `maximum` pixels in all. `of_video`: the most pixels of all frames of
    a video, if the family bounds them.
    """

    patch_size: int
    merge_size: int
    minimum: int
    maximum: int
    of_video: int

    @property
    def factor(self) -> int:
        """Height and width of a token in pixels."""
        return self.patch_size * self.merge_size


class Medium(NamedTuple):
    """A whole image or video: its patches (P, patch_dim), the grid that they fill, and the seconds of a step in time
    (0: an image).
    """

    patches: np.ndarray
    grid: Grid
    seconds: float


@dataclass(frozen=True)
class Family(ABC):
    """A family's tokens and files, and how it turns images and videos into text and grids."""

    name: ClassVar[str]
    """The `model_type` in config.json."""

    chat_template: ClassVar[str]
    """The chat template of its presets."""

    tokens: ClassVar[Mapping[str, str]]
    """By purpose: image, video, vision_start, vision_end, bos, eos, pad."""

    marks: ClassVar[Mapping[str, str]]
    """What the chat template writes for an image and for a video, as regular expressions."""

    special_tokens: ClassVar[Sequence[str]]
    """The special tokens of the byte-level tokenizer of its presets, in the order of their ids."""

    named_tokens: ClassVar[Mapping[str, str]] = {}
    """Tokens that its processor reads from attributes of the tokenizer."""

    structure_tokens: ClassVar[Sequence[str]]
    """Tokens that mark turns and images, which a text does not mean when it spells one (see chat_template.py)."""

    image_processors: ClassVar[tuple[str, ...]]
    """What the names of its image processors begin with (`image_processor_type`)."""

    image_settings: ClassVar[Mapping[str, Any]]
    """Settings of the image processor that apply if a folder does not say otherwise."""

    merged_order: ClassVar[bool] = True
    """Whether the patches of one token are consecutive; otherwise patches come row by row."""

    @abstractmethod
    def of_model(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings that a model's configuration (config.json) holds, alone or in addition to the processor's files.
        """

    def plain(self, name: str, value: Any) -> Any:
        """The value of a setting in the form used here: some files have a pair of equal numbers instead of one number.
        """
        if not name.endswith("_size"):
            return value
        return int(value[0] if isinstance(value, (list, tuple)) and len(set(value)) == 1 else value)

    @abstractmethod
    def image_processor(self, settings: Mapping[str, Any], bounds: Bounds) -> Any:
        """The image processor of transformers, on Pillow (imports torch)."""

    @abstractmethod
    def image_patches(self, values: Any, bounds: Bounds) -> np.ndarray:
        """The patches (P, patch_dim) from the `pixel_values` that the image processor makes of one image."""

    @abstractmethod
    def processor_files(
        self, settings: Mapping[str, Any], bounds: Bounds, limits: MediaLimits
    ) -> Mapping[str, Mapping[str, Any]]:
        """The files, by name, from which transformers makes the family's processor."""

    @abstractmethod
    def image_grid(self, width: int, height: int, settings: Mapping[str, Any], bounds: Bounds) -> Grid:
        """The grid of an image of this many pixels: patches in time (or tiles), height and width.

        Raises:
            RowError: the family refuses the image.
        """

    @abstractmethod
    def frame_size(
        self, clip: Clip, num_frames: int, settings: Mapping[str, Any], bounds: Bounds
    ) -> tuple[int, int]:
        """(height, width) in pixels to which the `num_frames` frames taken from a video are scaled."""

    def most_frame_pixels(self, max_pixels: int) -> int:
        """The most pixels of a frame if `max_pixels` are allowed."""
        return max_pixels

    @abstractmethod
    def num_frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> int:
        """The number of frames that are taken from a video."""

    @abstractmethod
    def frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> list[int]:
        """The indices of the frames that are taken, ascending (may import torch)."""

    @abstractmethod
    def video_text(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> str:
        """The text that replaces a video's mark; it has the video token once for each run of vision tokens."""

    def image_text(self) -> str:
        """The text that replaces an image's mark."""
        return self.tokens["image"]

    @abstractmethod
    def video_runs(self, grid: Grid, merge_area: int) -> Sequence[int]:
        """The number of vision tokens in each of these runs, for a whole video of this grid."""

    @abstractmethod
    def model_inputs(self, media: Sequence[Medium], bounds: Bounds) -> dict[str, np.ndarray]:
        """What the model of transformers takes of the images and videos of one sequence, in the order of the text."""

    def seconds_per_step(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> float:
        """Seconds between two steps in time of a video's grid."""
        num_frames = self.num_frames(clip, limits, temporal_patch_size)
        return temporal_patch_size * clip.num_frames / (num_frames * clip.frames_per_second)


def check_shape(height: int, width: int) -> None:
    """Refuse a picture whose longer side is more than 200 times its shorter side."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise RowError(
            f"an image of {width}x{height} pixels has the aspect ratio {ratio:g}; allowed: at most {MAX_ASPECT_RATIO}"
        )


def patches(frames: np.ndarray, temporal_patch_size: int, patch_size: int, merge_size: int) -> np.ndarray:
    """Cut frames (T, 3, H, W), T a multiple of `temporal_patch_size`, into patches (P, 3 x temporal_patch_size x
    patch_size x patch_size).
    """
    time, channels, height, width = frames.shape
    cut = frames.reshape(time // temporal_patch_size, temporal_patch_size, channels, height // patch_size // merge_size,
                         merge_size, patch_size,
                         width // patch_size // merge_size, merge_size, patch_size)
    ordered = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(-1, channels * temporal_patch_size * patch_size**2)


def grid_of(
    family: Family, size: Size, settings: Mapping[str, Any], bounds: Bounds, limits: MediaLimits
) -> Grid:
    """Patches (time, height, width) of an image or of a whole video.

    Raises:
        RowError: an image or video that the family refuses.
    """
    if not isinstance(size, Clip):
        return family.image_grid(*size, settings, bounds)
    together = int(settings["temporal_patch_size"])
    num_frames = family.num_frames(size, limits, together)
    rows, columns = family.frame_size(size, num_frames, settings, bounds)
    return (-(-num_frames // together), rows // bounds.patch_size, columns // bounds.patch_size)


def largest_image_tokens(family: Family, max_pixels: int, frame_pixels: int, token_pixels: int) -> int:
    """Vision tokens of the largest entry that one rank encodes: an image of `max_pixels`, or a piece of a video whose
    frames have at most `frame_pixels` before the family rounds.
    """
    return max(SLICE_TOKENS, max_pixels // token_pixels, family.most_frame_pixels(frame_pixels) // token_pixels)


def pieces_of(size: Size, grid: Grid, merge_area: int, slice_tokens: int = SLICE_TOKENS) -> list[Grid]:
    """The grids into which an image or a video is cut: a video is cut in time, into pieces of at most `slice_tokens`
    tokens or of one step in time.
    """
    if not isinstance(size, Clip):
        return [grid]
    steps, rows, columns = grid
    length = max(1, slice_tokens * merge_area // (rows * columns))
    return [(min(length, steps - first), rows, columns) for first in range(0, steps, length)]
