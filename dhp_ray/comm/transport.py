"""How the members of a pack reach each other.

    pool    each set of ranks has a process group of its own, made when it is first needed and kept in a bounded pool;
            packs for whose group the pool has no room use the parent
    parent  one group of all ranks that carries nothing else; nothing is made during training

All ranks of the world keep the same state of the pool, and create and destroy together, members or not: torch numbers
groups by how many each process has created, so a rank that stays out of one would name the next differently and hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dhp_ray.comm.device import CPU, Accelerator
from dhp_ray.comm.group_cache import GroupCacheState, Key, key_of
from dhp_ray.comm.pack_communicator import PackCommunicator, post_together
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import own_rank, torch_peer
from dhp_ray.comm.world import forget_keys, make_group

COUNTERS = {"hit": "hits", "create": "creations", "evict": "evictions", "overflow": "overflows"}


class GroupPool:
    """At most `capacity` groups at a time; the least recently used goes first.

    `timeout` is that of every group's operations: a new group does not inherit the world's. `counters` are equal on all
    ranks: hits and creations of groups that plans asked for, evictions, and overflows: groups that found the pool full
    of others of the same plan and are left to the parent.
    """

    def __init__(
        self, capacity: int, timeout: timedelta, accelerator: Accelerator = CPU, progress: Progress | None = None
    ) -> None:
        if capacity < 0:
            raise ValueError(f"a pool of {capacity} groups; allowed: at least 0")
        self.timeout, self.accelerator = timeout, accelerator
        self.progress = progress or Progress(accelerator.torch_device())
        self.counters = dict.fromkeys(COUNTERS.values(), 0)
        self._state = GroupCacheState(capacity)
        self._groups: dict[Key, dist.ProcessGroup] = {}

    def prepare(self, process_groups: Sequence[tuple[int, ...]]) -> None:
        """Make the groups of a plan ready. Every rank of the world calls this alike, before the plan's first pack."""
        for change, key in self._state.take(process_groups):
            self.counters[COUNTERS[change]] += 1
            if change == "evict":
                self._destroy(key)
            elif change == "create":
                self._create(key)

    def get(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of these ranks, in any order; None if it is not in the pool."""
        return self._groups.get(key_of(ranks))

    def clear(self) -> None:
        """Destroy every group. All ranks that are left call this alike."""
        for key in self._state.held():
            self._destroy(key)
        self._state.clear()

    def _create(self, key: Key) -> None:
        with self.progress.waiting("making of a process group"):
            self._groups[key] = make_group(key, self.accelerator.backend, self.timeout,
                                           self.accelerator.pack_options())
        if own_rank() in key:
            warm_up_group(self._groups[key], key, self.progress)
            if self.accelerator.backend != "gloo":
                forget_keys(self._groups[key], key)

    def _destroy(self, key: Key) -> None:
        group = self._groups.pop(key)
        if own_rank() in key:
            with self.progress.waiting("end of a process group"):
                dist.destroy_process_group(group)


def warm_up_group(group: dist.ProcessGroup, ranks: Sequence[int], progress: Progress) -> None:
    """Exchange one number between every two members: the first batch of a group must involve all of its ranks.

    NCCL and HCCL build a communicator's channels then; a later exchange may leave out members that hold no tokens.
    """
    mine = own_rank()
    others = [rank for rank in ranks if rank != mine]
    sent = torch.full((1,), float(mine), device=progress.device)
    received = torch.empty(len(others), device=progress.device)
    operations = [dist.P2POp(dist.isend, sent, torch_peer(rank), group=group) for rank in others]
    operations += [dist.P2POp(dist.irecv, number, torch_peer(rank), group=group)
                   for rank, number in zip(others, received.split(1))]
    with progress.waiting("first exchange of a process group"):
        for work in post_together(operations):
            work.wait()
    wrong = [rank for rank, number in zip(others, progress.read(received)) if number != rank]
    if wrong:
        raise RuntimeError(f"process group {tuple(ranks)}: rank {mine} received wrong numbers from ranks {wrong}")


class Transport:
    """The links of packs in one generation (`open_transport`). `parent`: the group of all ranks; None: one rank."""

    def __init__(self, rank: int, parent: dist.ProcessGroup | None, pool: GroupPool | None, progress: Progress) -> None:
        self._rank, self._parent, self._pool, self._progress = rank, parent, pool, progress

    def prepare(self, process_groups: Sequence[tuple[int, ...]]) -> None:
        """Make ready for a plan with these groups; every rank of the world calls it alike at the start of a step."""
        if self._pool is not None:
            self._pool.prepare(process_groups)

    def link(self, ranks: Sequence[int], pack_index: int) -> PackCommunicator:
        """The communicator of one pack of the prepared plan, for a rank that is among `ranks`."""
        own = self._pool.get(ranks) if self._pool is not None else None
        return PackCommunicator(ranks, self._rank, own or self._parent, pack_index, self._progress)

    def counters(self) -> dict[str, int]:
        """Totals since the start: hits, creations, evictions and overflows of the pool; empty without one."""
        return dict(self._pool.counters) if self._pool is not None else {}

    def close(self) -> None:
        """Destroy every group that the transport made; every rank calls it alike."""
        if self._pool is not None:
            self._pool.clear()
        if self._parent is not None:
            dist.destroy_process_group(self._parent)
            self._parent = None


def open_transport(
    name: str,
    rank: int,
    world_size: int,
    accelerator: Accelerator,
    capacity: int,
    timeout: timedelta,
    progress: Progress | None = None,
) -> Transport:
    """Return the transport called `name` (pool or parent); every rank calls this alike, after `init_process_group`.

    The parent has its own group, apart from the sharding's, because its messages must not be ordered against
    collectives. All ranks warm it up here, since later exchanges involve only some. A world of one rank needs no group
    at all.
    """
    progress = progress or Progress(accelerator.torch_device())
    group = None
    if world_size > 1:
        ranks = range(world_size)
        group = make_group(ranks, accelerator.backend, timeout, accelerator.pack_options())
        warm_up_group(group, ranks, progress)
    pool = GroupPool(capacity, timeout, accelerator, progress) if name == "pool" else None
    return Transport(rank, group, pool, progress)
