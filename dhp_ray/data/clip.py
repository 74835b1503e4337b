"""What a video consists of."""

from __future__ import annotations

from dataclasses import dataclass


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
