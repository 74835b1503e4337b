"""The faults of a simulated run and its slow ranks, all of which follow from the seed; and from one generation to the
next: who is left, from which step they continue, and when.

The decisions are those of `runtime/driver/elastic.py`; the durations are given (`FaultSettings`):

    fault ---- seen_s ----| ---- form_s ----| the group is formed     a fault in between starts this again
                          | ---- return_s --------------| lost ranks can join, between two steps (join_s)

If the driver is lost, workers end their step meanwhile; form_s begins once they have, and the driver is back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.errors import PlanError
from dhp_ray.runtime.driver.elastic import Failures, Stop, Wait, replica_ranks_of, shortage, surviving_state
from dhp_ray.runtime.messages import HeldShards
from dhp_ray.simulate.settings import KINDS, FaultKind, FaultSettings

WHEN, SPEED = 1, 2  # separate streams of random numbers, so that a change of one leaves the others as they are


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


def speeds_of(settings: FaultSettings, num_ranks: int, seed: int) -> np.ndarray:
    """The speed of each slot; 1 is nominal."""
    random, found = np.random.default_rng([seed, SPEED]), np.ones(num_ranks)
    for slow in settings.slow:
        chosen = [int(word) for word in slow.ranks.split(",") if word.strip()]
        found[chosen or random.permutation(num_ranks)[: round(slow.share * num_ranks)].tolist()] *= slow.speed
    return found


KEPT = 2  # how many versions a rank holds of its own shard, and of those mirrored last


class SimulatedGeneration:
    """One membership, a rank of each slot in slot order. It began with the state after step `first` and has that after
    `newest`. `mirrored`: (step, time at which the copies arrive) of the versions that two ranks hold.
    """

    def __init__(self, number: int, slots: Sequence[int], ranks_per_node: int, first: int, mirrors: bool) -> None:
        self.number, self.slots, self.ranks_per_node = number, sorted(slots), ranks_per_node
        self.first = self.newest = first
        self.size, self.mirrors = len(slots), mirrors
        self.nodes = tuple(map(self.node_of, self.slots))
        self.mirrored: list[tuple[int, float]] = []

    @cached_property
    def replica_ranks(self) -> tuple[int, ...]:
        return replica_ranks_of([str(node) for node in self.nodes]) if self.mirrors else ()

    def slot_of(self, fault: Fault) -> int:
        """The slot that a fault strikes; a given one need not be a member."""
        return self.slots[min(int(fault.place * self.size), self.size - 1)] if fault.slot is None else fault.slot

    def node_of(self, slot: int) -> int:
        return slot // self.ranks_per_node


def held_by(survivors: Sequence[int], generation: SimulatedGeneration, time_s: float) -> list[list[HeldShards]]:
    """The shard versions that each of these slots holds, with the copies that had arrived by `time_s`."""
    rank_of = {slot: rank for rank, slot in enumerate(generation.slots)}
    own = set(range(max(generation.first, generation.newest - KEPT + 1), generation.newest + 1))
    twice = set(sorted(step for step, arrived_s in generation.mirrored if arrived_s <= time_s)[-KEPT:])
    replicas: dict[int, list[int]] = {}
    for owner, rank in enumerate(generation.replica_ranks if twice else ()):
        replicas.setdefault(rank, []).append(owner)
    return [[HeldShards(generation.number, generation.size,
                        {rank: sorted(own | twice)} | {owner: sorted(twice) for owner in replicas.get(rank, ())})]
            for rank in map(rank_of.__getitem__, survivors)]


Formed = tuple[SimulatedGeneration, float, str]  # a generation, when it is formed, and why


@dataclass
class Recovery:
    """What a run can continue with: workers that come back, and checkpoints. `holds`: whether this many ranks hold the
    waiting sequences. `another`: takes the next fault if it strikes before a time. `saves`: (step, when its checkpoint
    is complete).
    """

    faults: FaultSettings
    num_ranks: int
    mirrors: bool
    holds: Callable[[int], bool]
    another: Callable[[float], Fault | None]
    saves: list[tuple[int, float]] = field(default_factory=list)
    _coming: dict[int, float] = field(default_factory=dict)  # when each of these slots can join
    _evicted: set[int] = field(default_factory=set)
    _failures: Failures = field(default_factory=Failures)

    def changed(self, generation: SimulatedGeneration, now_s: float, slow: Collection[int]) -> Formed | None:
        """The next generation if ready slots join or slow ones leave, once, between two steps, else None. With too few
        ranks the run waits for others. PlanError: it cannot go on.
        """
        leaving = set(slow) - self._evicted if self.faults.policy == "elastic" else set[int]()
        if not leaving and not self._ready(now_s) and self._needed(generation.size) <= generation.size:
            return None
        self._evicted |= leaving
        stay = [slot for slot in generation.slots if slot not in leaving]
        for slot in leaving:
            self._coming[slot] = now_s + self.faults.worker.return_s
        why = [f"{len(leaving)} leave, which are slow"] if leaving else []
        if leaving and self.mirrors:  # their state is copied, or saved, before they leave
            generation.mirrored.append((generation.newest, now_s))
        elif leaving:
            self.saves.append((generation.newest, now_s))
        stands_s, fault = self._stands_s(now_s, stay)
        if fault:
            return self._after_fault(generation, fault, max(now_s, stands_s), why)
        joining = self._ready(stands_s)
        why = [f"{len(joining)} join"] * bool(joining) + why
        formed = self._formed(generation, stay, stands_s, generation.newest)
        return formed, stands_s + self.faults.join_s, " and ".join(why)

    def recovered(self, generation: SimulatedGeneration, fault: Fault, now_s: float) -> Formed:
        """The generation that follows a fault in a step. PlanError: the run cannot go on."""
        self._failed(generation.newest + 1)
        return self._after_fault(generation, fault, now_s, [])

    def lost_by(self, generation: SimulatedGeneration, fault: Fault) -> set[int]:
        """The slots that a fault takes of those that are there, and with a node those that were to return."""
        there = {*generation.slots} - (self._coming.keys() if self.faults.policy == "elastic" else set())
        match fault.kind:
            case "driver":
                return set()
            case "all":
                return there
            case "node":
                node = generation.node_of(generation.slot_of(fault))
                return {slot for slot in there | self._coming.keys() if generation.node_of(slot) == node}
            case _:
                return {generation.slot_of(fault)} & there

    def _after_fault(self, generation: SimulatedGeneration, fault: Fault, now_s: float, why: list[str]) -> Formed:
        """The generation that follows a fault. Slots that have left the group already are not among its survivors."""
        broken_s, survivors, seen = now_s, {*generation.slots} - self._coming.keys(), [fault.kind]
        driver_back_s, following = 0.0, fault
        while True:
            kind: FaultKind = getattr(self.faults, following.kind)
            lost = self.lost_by(generation, following)
            if self.faults.policy == "restart" and lost:
                lost = {*generation.slots}
            survivors -= lost
            seen_s = max(now_s, following.time_s) + kind.seen_s
            if following.kind == "driver":  # workers end their step meanwhile
                driver_back_s = following.time_s + kind.seen_s
                seen_s = now_s
            for slot in lost:
                self._coming[slot] = max(self._coming.get(slot, 0.0), seen_s + kind.return_s)
            formed_s = max(seen_s, driver_back_s) + kind.form_s
            now_s, another = self._stands_s(formed_s, survivors)
            if another is None:
                break
            following = another
            seen.append(following.kind)
            if following.time_s < formed_s:
                self._failed(generation.newest + 1)
        self.saves = [(step, whole_s) for step, whole_s in self.saves if whole_s <= broken_s]  # others are given up
        saved = max((step for step, _ in self.saves), default=0)
        state = surviving_state(held_by(sorted(survivors), generation, broken_s))
        step = state.version if state else -1
        if step < saved:
            step, now_s = saved, now_s + self.faults.load_s
        formed = self._formed(generation, sorted(survivors), now_s, step)
        return formed, now_s, " and ".join([*why, f"{', '.join(seen)} lost"])

    def _failed(self, step: int) -> None:
        """Count a generation that broke in a step or while it formed. PlanError: too often."""
        self._failures = self._failures.with_one(step, raised=False)
        if self._failures.hopeless(step):
            raise PlanError(f"step {step} has failed {self._failures.steps.count(step)} times")

    def _stands_s(self, time_s: float, survivors: Collection[int]) -> tuple[float, Fault | None]:
        """Return (when there are enough ranks to continue, None), or (when a fault strikes before, this fault)."""
        while True:
            fault = self.another(time_s)
            if fault:
                return fault.time_s, fault
            size = len(survivors) + len(self._ready(time_s))
            needed = self._needed(size)
            match shortage(len(survivors), len(self._ready(time_s)), needed, self.num_ranks):
                case None:
                    return time_s, None
                case Stop(reason):
                    raise PlanError(reason)
                case Wait():
                    later = [ready_s for ready_s in self._coming.values() if ready_s > time_s]
                    if not later:
                        raise PlanError(f"{size} ranks are left, the run needs {needed}, and none comes back")
                    time_s = min(later)

    def _needed(self, size: int) -> int:
        """The number of ranks that the run needs: `size` + 1 if `size` ranks do not hold the next batches."""
        needed = self.num_ranks if self.faults.policy == "restart" else self.faults.min_workers
        if size < self.num_ranks and not self.holds(max(1, size)):
            needed = max(needed, size + 1)
        return needed

    def _ready(self, now_s: float) -> list[int]:
        return [slot for slot, ready_s in self._coming.items() if ready_s <= now_s]

    def _formed(self, generation: SimulatedGeneration, stay: list[int], now_s: float, step: int) -> SimulatedGeneration:
        """The next generation, of the slots that stay and those that are ready."""
        joining = self._ready(now_s)
        for slot in joining:
            del self._coming[slot]
        slots = [*stay, *joining]
        return SimulatedGeneration(generation.number + 1, slots, generation.ranks_per_node, step,
                                   self.mirrors and len(slots) > 1)
