"""A bounded pool of process groups keyed by their ranks.

All ranks of the world keep the same book and create and destroy together, members or not: torch numbers groups by
how many each process has created, so a rank that stays out of one would name the next differently and hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dhp_ray.comm.book import Key, PoolBook, key_of
from dhp_ray.comm.device import CPU, Accelerator
from dhp_ray.comm.link import post_together
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import own_rank, torch_peer
from dhp_ray.comm.world import forget_keys, make_group


class GroupPool:
    """At most `capacity` groups at a time; the least recently used goes first.

    `timeout` is that of every group's operations: a new group does not inherit the world's. Counters, equal on all
    ranks: `hits` and `creations` of groups that plans asked for, `evictions`, and `overflows`: groups that found the
    pool full of others of the same plan and are left to the parent transport.
    """

    def __init__(
        self, capacity: int, timeout: timedelta, accelerator: Accelerator = CPU, progress: Progress | None = None
    ) -> None:
        if capacity < 0:
            raise ValueError(f"comm.pool_groups: got {capacity}; allowed: at least 0")
        self.capacity, self.timeout, self.accelerator = capacity, timeout, accelerator
        self.progress = progress or Progress(accelerator.torch_device())
        self.hits = self.creations = self.evictions = self.overflows = 0
        self._book = PoolBook(capacity)
        self._groups: dict[Key, dist.ProcessGroup] = {}

    def prepare(self, process_groups: Sequence[tuple[int, ...]]) -> None:
        """Make the groups of a plan ready. Every rank of the world calls this alike, before the plan's first pack."""
        for change, key in self._book.take(process_groups):
            match change:
                case "hit":
                    self.hits += 1
                case "evict":
                    self.evictions += 1
                    self._destroy(key)
                case "overflow":
                    self.overflows += 1
                case "create":
                    self.creations += 1
                    self._create(key)

    def get(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of these ranks, in any order; None if it is not in the pool."""
        return self._groups.get(key_of(ranks))

    def ranks(self) -> list[Key]:
        """Return the groups in the pool (sorted ranks), least recently used first."""
        return self._book.held()

    def clear(self) -> None:
        """Destroy every group. All ranks that are left call this alike."""
        for key in self._book.held():
            self._destroy(key)
        self._book.clear()

    def _create(self, key: Key) -> None:
        with self.progress.waiting("making of a process group"):
            self._groups[key] = make_group(key, self.accelerator.backend, self.timeout,
                                           self.accelerator.pool_options())
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
