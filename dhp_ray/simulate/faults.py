"""What goes wrong in a simulated run, and when: faults at given or drawn times, and ranks that are slow for a while.
Everything follows from the seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dhp_ray.simulate.settings import FaultSettings

KINDS = ("worker", "stopped", "node", "driver", "all")
WHEN, SPEED, NOISE = 1, 2, 3
"""Streams of random numbers, so that a change of one leaves the others as they are."""


class Fault(NamedTuple):
    """A fault, `time_s` after the first step began. It strikes the rank at `place` of all ranks that there are then,
    from 0 (the first) to below 1."""

    time_s: float
    kind: str
    place: float


def faults_of(settings: FaultSettings, num_ranks: int, seed: int) -> Iterator[Fault]:
    """All faults, in the order of time; without end where some are drawn."""
    given = sorted((event.time_s, KINDS.index(event.kind), event.rank / num_ranks) for event in settings.events)
    following = iter(given)
    event = next(following, None)
    for time_s, kind, place in _drawn(settings, seed):
        while event and event[0] <= time_s:
            yield Fault(event[0], KINDS[event[1]], event[2])
            event = next(following, None)
        yield Fault(time_s, kind, place)
    while event:
        yield Fault(event[0], KINDS[event[1]], event[2])
        event = next(following, None)


def _drawn(settings: FaultSettings, seed: int) -> Iterator[tuple[float, str, float]]:
    """Independent of one another: the time to the next one is exponential."""
    if not settings.every_s:
        return
    random, now_s = np.random.default_rng([seed, WHEN]), 0.0
    shares = np.array([getattr(settings, kind).share for kind in KINDS])
    while True:
        now_s += float(random.exponential(settings.every_s))
        kind = KINDS[int(random.choice(len(KINDS), p=shares / shares.sum()))]
        yield now_s, kind, float(random.random())


class Speeds:
    """How fast each worker's place is in each step; 1 is nominal."""

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
        """Whether all are of nominal speed throughout, and packs take what they should."""
        return not self._slow and not self._noise and bool((self._always == 1.0).all())

    def at(self, step: int) -> np.ndarray:
        """Of each place."""
        found = self._always.copy()
        for chosen, speed, first, last in self._slow:
            if first <= step and (not last or step <= last):
                found[chosen] *= speed
        return found

    def stretch(self, step: int, attempt: int, num_groups: int) -> np.ndarray | None:
        """How much longer the computing of each pack of a step takes than its cost says; None: as it says."""
        if not self._noise:
            return None
        random = np.random.default_rng([self._seed, NOISE, step, attempt])
        found: np.ndarray = np.exp(self._noise * random.standard_normal(num_groups))
        return found
