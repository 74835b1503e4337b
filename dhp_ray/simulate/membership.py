"""The members of a simulated run's group, and what they hold of its state: the inputs of `runtime/driver/elastic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dhp_ray.runtime.driver.elastic import replica_ranks_of
from dhp_ray.runtime.messages import HeldShards
from dhp_ray.simulate.faults import Fault

KEPT = 2
"""How many versions of its own shard a rank holds, and how many of those mirrored last (`state/peer_replica.py`)."""


@dataclass
class Generation:
    """One membership: the slot and the node of each rank, in rank order. It began with the state after step `first` and
    has that after step `newest`. `mirrored`: (step, time at which the copies arrive) of the versions that two ranks
    hold.
    """

    number: int
    slots: tuple[int, ...]
    nodes: tuple[int, ...]
    first: int
    newest: int
    ranks_per_node: int
    mirrors: bool = False
    mirrored: list[tuple[int, float]] = field(default_factory=list)
    _replica_ranks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.slots)

    def replica_ranks(self) -> tuple[int, ...]:
        if self.mirrors and not self._replica_ranks:
            self._replica_ranks = replica_ranks_of([str(node) for node in self.nodes])
        return self._replica_ranks

    def slot_of(self, fault: Fault) -> int:
        """The slot that a fault strikes; a given one need not be a member."""
        return self.slots[min(int(fault.place * self.size), self.size - 1)] if fault.slot is None else fault.slot

    def node_of(self, slot: int) -> int:
        return slot // self.ranks_per_node


class HeldState(NamedTuple):
    """The state of a generation as far as these slots still hold it, with the copies that had arrived at `time_s`."""

    generation: Generation
    slots: frozenset[int]
    time_s: float


def generation_of(number: int, slots: Sequence[int], ranks_per_node: int, step: int, mirrors: bool) -> Generation:
    """The group of these slots in slot order, so that the ranks of a node are neighbours."""
    ordered = tuple(sorted(slots))
    return Generation(number, ordered, tuple(slot // ranks_per_node for slot in ordered), step, step, ranks_per_node,
                      mirrors)


def held_by(survivors: Sequence[int], states: Sequence[HeldState]) -> list[list[HeldShards]]:
    """The shard versions that each of these slots holds, of some states. The copies that a generation began with count
    once it has taken a step, which waits for them.
    """
    found: list[list[HeldShards]] = [[] for _ in survivors]
    for generation, holders, time_s in states:
        rank_of = {slot: rank for rank, slot in enumerate(generation.slots) if slot in holders}
        own = set(range(max(generation.first, generation.newest - KEPT + 1), generation.newest + 1))
        arrived = [step for step, arrived_s in generation.mirrored if arrived_s <= time_s]
        twice = set(sorted(arrived)[-KEPT:]) if generation.newest > generation.first else set[int]()
        replicas: dict[int, list[int]] = {}
        for owner, rank in enumerate(generation.replica_ranks() if twice else ()):
            replicas.setdefault(rank, []).append(owner)
        for place, slot in enumerate(survivors):
            if slot in rank_of:
                rank = rank_of[slot]
                versions = {rank: sorted(own | twice)} | {owner: sorted(twice) for owner in replicas.get(rank, ())}
                found[place].append(HeldShards(generation.number, generation.size, versions))
    return found
