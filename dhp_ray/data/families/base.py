"""What the text and pixels of a model consist of, family by family: as its own processor of transformers makes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from dhp_ray.data.clip import Clip
from dhp_ray.data.errors import RowError
from dhp_ray.data.media import MediaLimits

if TYPE_CHECKING:
    from dhp_ray.planner.plan import Grid  # the planner takes numba


MAX_ASPECT_RATIO = 200


class Bounds(NamedTuple):
    """What an image or a frame is cut into: patches of `patch_size` x `patch_size` pixels, `merge_size` x `merge_size`
    of which make a token; and pixels from `minimum` to `maximum`. `of_video`: pixels of all frames of a video, at most,
    where the family bounds them.
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
    """A whole image or video: its patches (P, patch_dim), the grid that they fill, and seconds of a step in time (0: an
    image).
    """

    patches: np.ndarray
    grid: Grid
    seconds: float


@dataclass(frozen=True)
class Family(ABC):
    """A family's tokens, files, and the way from images and videos to text and grids."""

    name: ClassVar[str]
    """As config.json says it (`model_type`)."""

    chat_template: ClassVar[str]
    """Of its presets."""

    tokens: ClassVar[Mapping[str, str]]
    """By purpose: image, video, vision_start, vision_end, bos, eos, pad."""

    marks: ClassVar[Mapping[str, str]]
    """What the chat template writes for an image and for a video."""

    special_tokens: ClassVar[Sequence[str]]
    """Of the byte-level tokenizer of its presets, in the order of their ids."""

    named_tokens: ClassVar[Mapping[str, str]] = {}
    """Tokens that its processor knows by attributes of the tokenizer."""

    structure_tokens: ClassVar[Sequence[str]]
    """Tokens that mark turns and images. Text of a user that spells one would change what a sequence consists of."""

    image_processors: ClassVar[tuple[str, ...]]
    """How the names of its image processors begin (`image_processor_type`)."""

    image_settings: ClassVar[Mapping[str, Any]]
    """Of the image processor, where a folder does not say."""

    merged_order: ClassVar[bool] = True
    """Whether the patches of one token stand together; else they come row by row."""

    @abstractmethod
    def of_model(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Which settings a model's configuration (config.json) says too, or alone."""

    def plain(self, name: str, value: Any) -> Any:
        """The value of a setting in the form that it has here: some files have a pair of equal numbers for one."""
        if not name.endswith("_size"):
            return value
        return int(value[0] if isinstance(value, (list, tuple)) and len(set(value)) == 1 else value)

    @abstractmethod
    def image_processor(self, settings: Mapping[str, Any], bounds: Bounds) -> Any:
        """The image processor of transformers, on Pillow (imports torch)."""

    @abstractmethod
    def image_patches(self, values: Any, bounds: Bounds) -> np.ndarray:
        """The patches (P, patch_dim) of what it makes of one image, its `pixel_values`."""

    @abstractmethod
    def processor_files(
        self, settings: Mapping[str, Any], bounds: Bounds, limits: MediaLimits
    ) -> Mapping[str, Mapping[str, Any]]:
        """The files, by name, that transformers makes the family's processor of."""

    @abstractmethod
    def image_grid(self, width: int, height: int, settings: Mapping[str, Any], bounds: Bounds) -> Grid:
        """The grid of an image of this many pixels: patches in time (or tiles), height and width.

        Raises:
            RowError: an image that the family refuses.
        """

    @abstractmethod
    def frame_size(
        self, clip: Clip, num_frames: int, settings: Mapping[str, Any], bounds: Bounds
    ) -> tuple[int, int]:
        """(height, width) in pixels that the frames of a video are scaled to, of which so many are taken."""

    def most_frame_pixels(self, max_pixels: int) -> int:
        """Of a frame at most, where `max_pixels` are allowed."""
        return max_pixels

    @abstractmethod
    def num_frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> int:
        """How many frames of a video are taken."""

    @abstractmethod
    def frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> list[int]:
        """Numbers of the frames that are taken, ascending (may import torch)."""

    @abstractmethod
    def video_text(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> str:
        """What takes the place of a video's mark in the text: its token once for each run of vision tokens."""

    def image_text(self) -> str:
        """The same of an image."""
        return self.tokens["image"]

    @abstractmethod
    def video_runs(self, grid: Grid, merge_area: int) -> Sequence[int]:
        """Vision tokens of each of these runs, for a whole video of this grid."""

    @abstractmethod
    def model_inputs(
        self, ids: np.ndarray, media: Sequence[Medium], token_ids: Mapping[str, int], bounds: Bounds
    ) -> dict[str, np.ndarray]:
        """What the model of transformers takes beside the ids (L,) of one sequence: its images and videos, in the order
        of the text.
        """

    def seconds_per_step(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> float:
        """Seconds between two steps in time of a video's grid."""
        num_frames = self.num_frames(clip, limits, temporal_patch_size)
        return temporal_patch_size * clip.num_frames / (num_frames * clip.frames_per_second)


def check_shape(height: int, width: int) -> None:
    """Refuse a picture that is more than 200 times as long as it is wide."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise RowError(
            f"an image of {width}x{height} pixels has the aspect ratio {ratio:g}; allowed: at most {MAX_ASPECT_RATIO}"
        )


def patches(frames: np.ndarray, temporal_patch_size: int, patch_size: int, merge_size: int) -> np.ndarray:
    """Frames (T, 3, H, W), T a multiple of `temporal_patch_size`, to patches (P, 3 x temporal_patch_size x patch_size x
    patch_size).
    """
    time, channels, height, width = frames.shape
    cut = frames.reshape(time // temporal_patch_size, temporal_patch_size, channels, height // patch_size // merge_size,
                         merge_size, patch_size,
                         width // patch_size // merge_size, merge_size, patch_size)
    ordered = cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(-1, channels * temporal_patch_size * patch_size**2)
