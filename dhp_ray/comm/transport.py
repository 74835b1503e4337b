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

from dhp_ray.comm.device import Accelerator
from dhp_ray.comm.group_cache import GroupCacheState, Key, key_of
from dhp_ray.comm.pack_communicator import PackCommunicator, post_together
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import own_rank, torch_peer
from dhp_ray.comm.world import forget_keys, make_group

COUNTERS = {"hit": "hits", "create": "creations", "evict": "evictions", "overflow": "overflows"}


class Transport:
    """The links of packs in one generation, by the transport called `name` (pool or parent). Every rank makes it alike.

    `capacity`: the most groups that the pool keeps; the least recently used goes first. `timeout` is that of every
    group's operations: a new group does not inherit the world's.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        accelerator: Accelerator,
        capacity: int,
        timeout: timedelta,
        progress: Progress | None = None,
    ) -> None:
        self._rank, self._accelerator, self._timeout = rank, accelerator, timeout
        self._progress = progress or Progress(accelerator.torch_device())
        self._pool = GroupCacheState(capacity) if name == "pool" else None
        self._groups: dict[Key, dist.ProcessGroup] = {}
        self._counters = dict.fromkeys(COUNTERS.values(), 0) if name == "pool" else {}
        self._parent: dist.ProcessGroup | None = None
        if world_size > 1:  # apart from the sharding's group: messages must not be ordered against collectives
            self._parent = self._make(range(world_size))

    def prepare(self, process_groups: Sequence[tuple[int, ...]]) -> None:
        """Make the groups of a plan ready; every rank of the world calls this alike at the start of a step."""
        for change, key in self._pool.take(process_groups) if self._pool else ():
            self._counters[COUNTERS[change]] += 1
            if change == "evict":
                self._destroy(key)
            elif change == "create":
                self._groups[key] = self._make(key)

    def link(self, ranks: Sequence[int], pack_index: int) -> PackCommunicator:
        """The communicator of one pack of the prepared plan, for a rank that is among `ranks`."""
        group = self._groups.get(key_of(ranks), self._parent)
        return PackCommunicator(ranks, self._rank, group, pack_index, self._progress)

    def counters(self) -> dict[str, int]:
        """Totals since the start, equal on all ranks: hits and creations of groups that plans asked for, evictions, and
        overflows, which found the pool full of others of the same plan. Empty without a pool.
        """
        return dict(self._counters)

    def close(self) -> None:
        """Destroy every group that the transport made; every rank calls it alike."""
        for key in list(self._groups):
            self._destroy(key)
        if self._parent is not None:
            dist.destroy_process_group(self._parent)
            self._parent = None

    def _make(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        with self._progress.waiting("making of a process group"):
            group = make_group(ranks, self._accelerator.backend, self._timeout, self._accelerator.pack_options())
        if own_rank() in ranks:
            warm_up_group(group, ranks, self._progress)
            if self._accelerator.backend != "gloo":
                forget_keys(group, ranks)
        return group

    def _destroy(self, key: Key) -> None:
        group = self._groups.pop(key)
        if own_rank() in key:
            with self._progress.waiting("end of a process group"):
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
