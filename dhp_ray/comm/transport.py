"""How the members of a pack reach each other: a process group of their own from the pool, or one world group for all.

    pool    each set of ranks has its own communicator, created on first use (comm/pool.py)
    parent  every pack exchanges over one group of all ranks that carries nothing else; nothing is ever created
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from dhp_ray.comm.device import Accelerator
from dhp_ray.comm.link import Link
from dhp_ray.comm.pool import GroupPool, warm_up_group
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.world import make_group


class Transport(Protocol):
    """Made once per generation by all ranks alike."""

    def prepare(self, process_groups: Sequence[tuple[int, ...]]) -> None:
        """Make ready for a plan with these groups; every rank of the world calls it alike at the start of a step."""

    def link(self, ranks: Sequence[int], pack_index: int) -> Link:
        """The link of one pack of the prepared plan, for a rank that is among `ranks`."""

    def counters(self) -> dict[str, int]:
        """Totals since the start: hits, creations, evictions, overflows."""

    def close(self) -> None:
        """Destroy every group that the transport made; every rank calls it alike."""


class ParentTransport:
    """Every pack over one group of all ranks; messages of different packs are kept apart by tag and plan order."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, progress: Progress) -> None:
        self._group, self._rank, self._progress = group, rank, progress

    def prepare(self, process_groups: Sequence[tuple[int, ...]]) -> None:
        """Nothing to make: the one group is there."""

    def link(self, ranks: Sequence[int], pack_index: int) -> Link:
        return Link(ranks, self._rank, self._group, pack_index, self._progress)

    def counters(self) -> dict[str, int]:
        return {"hits": 0, "creations": 0, "evictions": 0, "overflows": 0}

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class PoolTransport:
    """Every pack over its ranks' own group; the parent carries those that the pool has no room for."""

    def __init__(self, pool: GroupPool, parent: ParentTransport, rank: int) -> None:
        self._pool, self._parent, self._rank = pool, parent, rank

    def prepare(self, process_groups: Sequence[tuple[int, ...]]) -> None:
        self._pool.prepare(process_groups)

    def link(self, ranks: Sequence[int], pack_index: int) -> Link:
        group = self._pool.get(ranks)
        if group is None:
            return self._parent.link(ranks, pack_index)
        return Link(ranks, self._rank, group, pack_index, self._pool.progress)

    def counters(self) -> dict[str, int]:
        return {"hits": self._pool.hits, "creations": self._pool.creations,
                "evictions": self._pool.evictions, "overflows": self._pool.overflows}

    def close(self) -> None:
        self._pool.clear()
        self._parent.close()


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
    if name not in ("pool", "parent"):
        raise ValueError(f"comm.transport: got {name!r}; allowed: pool, parent")
    progress = progress or Progress(accelerator.torch_device())
    group = None
    if world_size > 1:
        ranks = range(world_size)
        group = make_group(ranks, accelerator.backend, timeout)
        warm_up_group(group, ranks, progress)
    parent = ParentTransport(group, rank, progress)
    if name == "parent":
        return parent
    return PoolTransport(GroupPool(capacity, timeout, accelerator, progress), parent, rank)
