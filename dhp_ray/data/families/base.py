"""What the text and pixels of a model consist of, family by family: as its own processor of transformers makes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dhp_ray.data.clip import Clip
from dhp_ray.data.media import MediaLimits

if TYPE_CHECKING:
    from dhp_ray.planner.plan import Grid  # the planner takes numba


class Bounds(NamedTuple):
    """What an image or a frame is scaled to: sides in multiples of `factor` pixels, and pixels from `minimum` to
    `maximum`. `of_video`: pixels of all frames of a video, at most, where the family bounds them.
    """

    factor: int
    minimum: int
    maximum: int
    of_video: int


@dataclass(frozen=True)
class Family(ABC):
    """A family's tokens, files, and the way from images and videos to text and grids."""

    name: ClassVar[str]
    """As config.json says it (`model_type`)."""

    chat_template: ClassVar[str]
    """Of its presets."""

    tokens: ClassVar[Mapping[str, str]]
    """By purpose: image, video, vision_start, vision_end, bos, eos, pad."""

    structure_tokens: ClassVar[Sequence[str]]
    """Tokens that mark turns and images. Text of a user that spells one would change what a sequence consists of."""

    image_processors: ClassVar[tuple[str, ...]]
    """How the names of its image processors begin (`image_processor_type`)."""

    image_settings: ClassVar[Mapping[str, Any]]
    """Of the image processor, where a folder does not say."""

    sizes: ClassVar[Mapping[str, str]]
    """Which of these settings a model has to agree with, and what its configuration calls them."""

    @abstractmethod
    def image_processor(self, settings: Mapping[str, Any], bounds: Bounds) -> Any:
        """The image processor of transformers, on Pillow (imports torch)."""

    @abstractmethod
    def processor_files(
        self, settings: Mapping[str, Any], bounds: Bounds, limits: MediaLimits
    ) -> Mapping[str, Mapping[str, Any]]:
        """The files, by name, that transformers makes the family's processor of."""

    @abstractmethod
    def image_size(self, width: int, height: int, bounds: Bounds) -> tuple[int, int]:
        """(height, width) in pixels that an image of this many pixels is scaled to.

        Raises:
            RowError: an image that the family refuses.
        """

    @abstractmethod
    def frame_size(self, clip: Clip, num_frames: int, bounds: Bounds) -> tuple[int, int]:
        """The same of the frames of a video, of which so many are taken."""

    @abstractmethod
    def num_frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> int:
        """How many frames of a video are taken."""

    @abstractmethod
    def frames(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> list[int]:
        """Numbers of the frames that are taken, ascending (may import torch)."""

    @abstractmethod
    def video_text(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> str:
        """What takes the place of a video's token in the text: that token once for each run of vision tokens."""

    @abstractmethod
    def video_runs(self, grid: Grid, merge_area: int) -> Sequence[int]:
        """Vision tokens of each of these runs, for a whole video of this grid."""

    def seconds_per_step(self, clip: Clip, limits: MediaLimits, temporal_patch_size: int) -> float:
        """Seconds between two steps in time of a video's grid."""
        num_frames = self.num_frames(clip, limits, temporal_patch_size)
        return temporal_patch_size * clip.num_frames / (num_frames * clip.frames_per_second)
