"""What a video consists of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as its container describes it: pixels, frames in all, frames a second."""

    width: int
    height: int
    num_frames: int
    frames_per_second: float
