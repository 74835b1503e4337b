"""What a video consists of, and which of its frames a model sees: as `Qwen2VLVideoProcessor.sample_frames`
(transformers) takes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dhp_ray.data.media import MediaLimits

MIN_FRAMES = 4


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as its container describes it: pixels, frames in all, frames a second."""

    width: int
    height: int
    num_frames: int
    frames_per_second: float

    def num_sampled(self, limits: MediaLimits, temporal_patch_size: int) -> int:
        """How many frames are taken."""
        return math.ceil(self.num_frames / self._interval(limits, temporal_patch_size))

    def sampled(self, limits: MediaLimits, temporal_patch_size: int) -> list[int]:
        """Numbers of the frames taken, ascending, evenly over the video (imports torch, whose rounding decides)."""
        import torch

        numbers = torch.arange(0, self.num_frames, self._interval(limits, temporal_patch_size),
                               dtype=torch.float32).int()
        return numbers.clamp_(max=self.num_frames - 1).tolist()  # rounding can step on one frame too many

    def _interval(self, limits: MediaLimits, temporal_patch_size: int) -> float:
        """Frames from one that is taken to the next."""
        most = min(limits.max_frames, self.num_frames) // temporal_patch_size * temporal_patch_size
        wanted = min(max(self.num_frames / self.frames_per_second * limits.video_fps, MIN_FRAMES), most,
                     self.num_frames)
        return self.num_frames / max(1, math.floor(wanted / temporal_patch_size) * temporal_patch_size)

    def seconds_per_step(self, limits: MediaLimits, temporal_patch_size: int) -> float:
        """Seconds between two steps in time of the grid."""
        num_sampled = self.num_sampled(limits, temporal_patch_size)
        return temporal_patch_size * self.num_frames / (num_sampled * self.frames_per_second)
