"""After which steps the ranks copy their state to one another: `elastic.mirror_every_steps`.

A number n: after steps n, 2 n, ...; 0: never. With auto, copies may take SHARE of the run's time: if those of one
version take c seconds and a step s, they are made every ceil(c / (SHARE s)) steps. A copy travels while steps run, but
may take cores and links from them, so all of c is counted. A fault then costs at most the steps since the last copy,
about c / SHARE seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from dhp_ray.schema import MAX_MIRROR_STEPS

SHARE = 0.02
"""The largest share of a step's time that copies may take."""

RECENT = 8
"""The number of a rank's last copies of which the fastest counts: in slower ones, the rank waited for a peer or a core.
"""


def steps_between(copy_s: float, step_s: float, current: int) -> int:
    """Return the steps from one copy of the state to the next, if a copy takes `copy_s` and a step `step_s` seconds.

    The `current` number is kept while copies take no more than SHARE. It falls by a third or more, to a number that is
    still enough if copies take half as long again: times that vary a little do not change it to and fro.
    """
    needed, ample = (min(MAX_MIRROR_STEPS, max(1, math.ceil(room * copy_s / (SHARE * step_s)))) for room in (1.0, 1.5))
    return needed if needed > current else ample if 3 * ample <= 2 * current else current


class Mirroring:
    """Says after which steps the state is mirrored, over all generations of a run."""

    def __init__(self, setting: str) -> None:
        """`setting`: the value of `elastic.mirror_every_steps`."""
        self.auto = setting == "auto"
        self.every = 1 if self.auto else int(setting)
        self.enter()

    def enter(self) -> None:
        """Begin a new generation, with other ranks and other links. With auto its first step is mirrored, and measured.
        """
        self._last: int | None = None
        self._copies: list[deque[float]] = []

    def due(self, step: int) -> bool:
        if self.auto:
            return self._last is None or step - self._last >= self.every
        return self.every > 0 and step % self.every == 0

    def begun(self, step: int) -> None:
        """Note that the state after `step` is being copied."""
        self._last = step

    @property
    def copy_s(self) -> float:
        """Seconds that the slowest rank takes for the copies of one version; 0 if unknown."""
        return max((min(copies) for copies in self._copies if copies), default=0.0)

    def observe(self, seconds: Sequence[Sequence[float]], step_s: float) -> bool:
        """Note how long each rank's copies took since the last call; return whether `every` has changed.

        `step_s`: seconds of a step.
        """
        if not self._copies:
            self._copies = [deque(maxlen=RECENT) for _ in seconds]
        for copies, added in zip(self._copies, seconds, strict=True):
            copies.extend(added)
        before = self.every
        if self.auto and self.copy_s and step_s > 0:
            self.every = steps_between(self.copy_s, step_s, before)
        return self.every != before
