"""How the group reacts when something happens to it: pure functions from observations to decisions.

    condition_of       the status of one worker                -> healthy, dead, unresponsive, raised, stuck
    ProgressWatchdog   what successive polls show              -> which ranks pass no more marks
    shortage           how many workers, newcomers, bounds     -> wait for capacity, stop, or nothing
    surviving_state    the shard versions that survivors hold  -> the version to go on from, who supplies each shard
    replica_ranks_of   the nodes of the ranks                  -> which rank holds the replica of which rank's shard
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from dhp_ray.runtime.messages import HeldShards, Status

MAX_FAILURES = 8  # generations that may break in one and the same step before the run gives up


class Condition(StrEnum):
    """The condition of one worker. All but HEALTHY leave the group."""

    HEALTHY = "healthy"
    DEAD = "dead"
    UNRESPONSIVE = "unresponsive"
    RAISED = "raised"
    STUCK = "stuck"
    SLOW = "slow"
    DRAINED = "drained"


def condition_of(status: Status, overdue: bool) -> Condition:
    """`overdue`: it has passed no mark for longer than ProgressWatchdog allows."""
    if status.dead:
        return Condition.DEAD
    if not status.answered:
        return Condition.UNRESPONSIVE
    if status.error:
        return Condition.RAISED
    return Condition.STUCK if overdue else Condition.HEALTHY


class ProgressWatchdog:
    """How long each rank has passed no mark. One that waits for its peers does not stand still: one of them does."""

    def __init__(self, num_ranks: int, limit_s: float, now_s: float) -> None:
        self.limit_s = limit_s
        self._since_s = [now_s] * num_ranks
        self._mark_ids = [""] * num_ranks

    def overdue(self, rank: int, status: Status, now_s: float) -> bool:
        """Whether a rank has stood still for too long by now; call it at every poll."""
        if status.waits_for_peers or status.mark_id != self._mark_ids[rank]:
            self._since_s[rank], self._mark_ids[rank] = now_s, status.mark_id
        return now_s - self._since_s[rank] >= self.limit_s


@dataclass(frozen=True)
class Wait:
    """There are too few workers for the run to go on: wait until there are `num_ranks`."""

    num_ranks: int
    have: int


@dataclass(frozen=True)
class Stop:
    reason: str


def shortage(num_healthy: int, newcomers: int, min_ranks: int, max_ranks: int) -> Wait | Stop | None:
    """Return what keeps the run from going on with so many healthy workers and newcomers; None: nothing. `min_ranks`:
    the most of cluster.min_workers and of what the state and the longest waiting sequence need.
    """
    if min_ranks > max_ranks:
        return Stop(f"the next batch has a sequence that needs {min_ranks} ranks, and the run has at most {max_ranks} "
                    "(cluster.max_workers)")
    have = num_healthy + max(0, min(newcomers, max_ranks - num_healthy))
    return Wait(min_ranks, have) if have < min_ranks else None


@dataclass(frozen=True)
class Failures:
    """The step of each generation that has broken, and those in which a worker's own error was the cause."""

    steps: tuple[int, ...] = ()
    raised: tuple[int, ...] = ()

    def with_one(self, step: int, raised: bool) -> Failures:
        return Failures((*self.steps, step), (*self.raised, step) if raised else self.raised)

    def hopeless(self, step: int) -> bool:
        """Return whether to give up: a worker has raised in this step a second time, or it has broken too often."""
        return self.raised.count(step) > 1 or self.steps.count(step) > MAX_FAILURES


@dataclass(frozen=True)
class SurvivingState:
    """The state to go on from: `version` of `generation`; the worker at `place` supplies `owners[place]`."""

    generation: int
    version: int
    owners: tuple[tuple[int, ...], ...]


def surviving_state(
    held: Sequence[Sequence[HeldShards]], known: Collection[int] | None = None
) -> SurvivingState | None:
    """Return the highest version of which every shard survives complete, from what each worker holds. `known`: the
    versions that count, of which somebody knows the step that left them (None: all). Of several workers with a shard,
    the one that supplies the fewest so far supplies it.
    """
    sizes = {shards.generation: shards.world_size for found in held for shards in found}
    best: SurvivingState | None = None
    for generation, world_size in sorted(sizes.items()):
        mine = [next((shards.versions for shards in found if shards.generation == generation), {}) for found in held]
        holders: dict[int, dict[int, list[int]]] = {}  # by version and owner
        for place, versions in enumerate(mine):
            for owner, owned in versions.items():
                for version in owned:
                    holders.setdefault(version, {}).setdefault(owner, []).append(place)
        for version in sorted(version for version in holders if known is None or version in known):
            supplied: list[list[int]] = [[] for _ in held]
            for owner in range(world_size):
                if owner not in holders[version]:
                    break
                supplied[min(holders[version][owner], key=lambda place: (len(supplied[place]), place))].append(owner)
            else:
                if best is None or (version, generation) > (best.version, best.generation):
                    best = SurvivingState(generation, version, tuple(tuple(owners) for owners in supplied))
    return best


def replica_ranks_of(nodes: Sequence[str]) -> tuple[int, ...]:
    """Return for each rank the rank that holds its shard's replica: on another node if there is one, spread evenly.
    Empty for one rank.
    """
    if len(nodes) < 2:
        return ()
    places = nodes if len(set(nodes)) > 1 else range(len(nodes))
    keepers = [[*range(len(nodes))]]  # by how many replicas they hold so far, in order
    found = []
    for rank in range(len(nodes)):
        number, index = next(
            (number, index) for number, ranks in enumerate(keepers) for begin in (bisect(ranks, rank),)
            for index in chain(range(begin, len(ranks)), range(begin))  # from the next rank on, all around
            if places[ranks[index]] != places[rank])
        found.append(keepers[number].pop(index))
        if number + 1 == len(keepers):
            keepers.append([])
        insort(keepers[number + 1], found[-1])
    return tuple(found)
