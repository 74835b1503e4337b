"""How fast each rank is, from what its packs should have cost and what they did cost. Nothing here calls a worker.

A rank's slowdown is its unblocked seconds over the nominal compute seconds of the packs that it ran: neither long packs
nor waiting for others change it. Slowdowns are smoothed over a few steps; a rank's speed is the group's typical
slowdown over its own, so a machine that is slow as a whole, or a cost file that is off, makes no rank slow.

The planner divides a pack's work by the speed, but not what each pack pays once (`pack_s`: launches). So it is told the
speed of the work alone: a rank with 5 s of work and 1 s paid once that is busy for 11 s is reported with speed 6/11,
and planned with 5/10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dhp_ray.train.results import StepResult

DECAY = 0.5
"""The weight of the last step's sums in the next: after three steps, seven eighths of a change are visible."""

NOMINAL_FROM = 0.85
"""At this speed and above, a rank counts as one of nominal speed, so that plans do not follow noise."""

GRAIN = 0.05
"""Lower speeds are rounded for the planner to multiples of this from one half up, of half of this from one quarter up,
and so on: a very slow rank would hold up all others if it were taken to be a little faster than it is.
"""

SLOW_BELOW = 0.7
SLOW_STEPS = 5
"""A rank counts as slow, and is reported, after SLOW_STEPS steps in a row below SLOW_BELOW."""

FORGET_AFTER = 10
"""After this many steps without a pack, a rank counts as one of nominal speed, so that it gets a pack and is measured.
"""


@dataclass
class _Rank:
    nominal_s: float = 0.0
    busy_s: float = 0.0
    once_s: float = 0.0
    unseen: int = 0
    below: dict[float, int] = field(default_factory=dict)


@dataclass
class SpeedMeter:
    """The speeds of one generation's ranks. One below `evict_below` for `patience` steps in a row should be replaced.
    """

    num_ranks: int
    evict_below: float = 0.0
    patience: int = 20
    _ranks: list[_Rank] = field(init=False, repr=False)
    _measured: tuple[float, ...] = field(init=False, repr=False)
    _typical: float = field(init=False, repr=False, default=1.0)
    _reported: set[int] = field(init=False, repr=False, default_factory=set)

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.num_ranks)]
        self._measured = (1.0,) * self.num_ranks

    def observe(self, nominal_s: Sequence[float], busy_s: Sequence[float], once_s: Sequence[float] = ()) -> None:
        """Take in one step: seconds by rank. `once_s`: the part of `nominal_s` that packs pay once (empty: none)."""
        for rank, nominal, busy, once in zip(self._ranks, nominal_s, busy_s, once_s or [0.0] * len(busy_s),
                                             strict=True):
            if nominal > 0 and busy > 0:
                rank.nominal_s = DECAY * rank.nominal_s + nominal
                rank.busy_s = DECAY * rank.busy_s + busy
                rank.once_s = DECAY * rank.once_s + once
                rank.unseen = 0
            else:
                rank.unseen += 1
                if rank.unseen >= FORGET_AFTER:
                    rank.nominal_s = rank.busy_s = rank.once_s = 0.0
        slowdowns = sorted(rank.busy_s / rank.nominal_s for rank in self._ranks if rank.nominal_s > 0)
        self._typical = typical = slowdowns[(len(slowdowns) - 1) // 2] if slowdowns else 0.0  # the lower median
        self._measured = tuple(
            typical * rank.nominal_s / rank.busy_s if rank.busy_s > 0 else 1.0 for rank in self._ranks)
        for rank, speed in zip(self._ranks, self._measured):
            passed = [limit for limit in (SLOW_BELOW, self.evict_below) if speed < limit]
            rank.below = {limit: rank.below.get(limit, 0) + 1 for limit in passed}

    def measured(self) -> tuple[float, ...]:
        """Speed of each rank: 1.0 is the group's typical one."""
        return self._measured

    def planned(self) -> tuple[float, ...]:
        """The speeds to plan with: those of the packs' work, without what they pay once."""
        return tuple(1.0 if speed >= NOMINAL_FROM else _told(self._work_speed(rank))
                     for rank, speed in zip(self._ranks, self.measured()))

    def _work_speed(self, rank: _Rank) -> float:
        """Return the speed of a slow rank's work; its busy seconds are more than what its packs pay once."""
        return self._typical * (rank.nominal_s - rank.once_s) / (rank.busy_s - self._typical * rank.once_s)

    def slow(self) -> set[int]:
        """Return the ranks that have been slow for SLOW_STEPS steps or more."""
        return {place for place, rank in enumerate(self._ranks) if rank.below.get(SLOW_BELOW, 0) >= SLOW_STEPS}

    def news(self) -> dict[int, bool]:
        """Return the ranks that have become slow (True) or are no longer slow (False) since the last call."""
        slow, reported = self.slow(), self._reported
        self._reported = slow
        return {rank: rank in slow for rank in sorted(slow ^ reported)}

    def no_good(self) -> tuple[int, ...]:
        """Return the ranks that should be replaced."""
        return tuple(place for place, rank in enumerate(self._ranks)
                     if rank.below.get(self.evict_below, 0) >= self.patience)


def _told(speed: float) -> float:
    grain = GRAIN * 2.0 ** (1 + math.floor(math.log2(speed)))
    return round(speed / grain) * grain


def busy_s(results: Sequence[StepResult], num_ranks: int) -> list[float]:
    """Unblocked seconds of each rank's packs and encoder phases; 0 for a rank that has not reported."""
    seconds = [0.0] * num_ranks
    for result in results:
        seconds[result.rank] = sum(time.busy_s for time in (*result.pack_times, *result.encoder_times))
    return seconds
