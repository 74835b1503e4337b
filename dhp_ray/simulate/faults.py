"""The faults of a simulated run, at given or drawn times, and ranks that are slow for a while. All of it follows from
the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from dhp_ray.simulate.settings import FaultSettings

KINDS = ("worker", "stopped", "node", "driver", "all")
WHEN, SPEED, NOISE = 1, 2, 3
"""Separate streams of random numbers, so that a change of one leaves the others as they are."""


class Fault(NamedTuple):
    """A fault, `time_s` after the first step began. It strikes the worker of `slot`, or the node that has that slot.
    `slot` None: the rank that is at the share `place` (0: the first; below 1) of all ranks of the group at that time.
    """

    time_s: float
    kind: str
    place: float = 0.0
    slot: int | None = None


def faults_of(settings: FaultSettings, seed: int) -> Iterator[Fault]:
    """All faults in order of time; endless if some are drawn."""
    given = [Fault(event.time_s, event.kind, slot=event.rank) for event in settings.events]
    given.sort(key=lambda fault: (fault.time_s, KINDS.index(fault.kind), fault.slot))
    return merge(given, _drawn(settings, seed), key=attrgetter("time_s"))


def _drawn(settings: FaultSettings, seed: int) -> Iterator[Fault]:
    """Independent faults: the time to the next one is exponentially distributed."""
    if not settings.every_s:
        return
    random, now_s = np.random.default_rng([seed, WHEN]), 0.0
    shares = np.array([getattr(settings, kind).share for kind in KINDS])
    while True:
        now_s += float(random.exponential(settings.every_s))
        kind = KINDS[int(random.choice(len(KINDS), p=shares / shares.sum()))]
        yield Fault(now_s, kind, float(random.random()))


class Speeds:
    """The speed of each slot in each step; 1 is nominal."""

    def __init__(self, settings: FaultSettings, num_ranks: int, seed: int) -> None:
        self._seed, self._noise = seed, settings.noise
        random = np.random.default_rng([seed, SPEED])
        self._always = np.exp(settings.spread * random.standard_normal(num_ranks))
        self._slow = []
        for slow in settings.slow:
            chosen = [int(word) for word in slow.ranks.split(",") if word.strip()]
            chosen = chosen or random.permutation(num_ranks)[: round(slow.share * num_ranks)].tolist()
            self._slow.append((np.array(chosen, dtype=np.int64), slow.speed, slow.first_step, slow.last_step))

    @property
    def even(self) -> bool:
        """Whether all slots have nominal speed in every step and packs take what their cost says."""
        return not self._slow and not self._noise and bool((self._always == 1.0).all())

    def at(self, step: int) -> np.ndarray:
        """The speed of each slot in a step."""
        found = self._always.copy()
        for chosen, speed, first, last in self._slow:
            if first <= step and (not last or step <= last):
                found[chosen] *= speed
        return found

    def stretch(self, step: int, attempt: int, num_groups: int) -> np.ndarray | None:
        """The factor by which the compute of each pack of a step is longer than its cost says; None: 1 for all."""
        if not self._noise:
            return None
        random = np.random.default_rng([self._seed, NOISE, step, attempt])
        found: np.ndarray = np.exp(self._noise * random.standard_normal(num_groups))
        return found
