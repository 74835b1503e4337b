"""Point-to-point exchange among the members of one pack, with the time that a member is blocked in it.

    post:  exchange(sends, receives) -> Pending      both directions at once, nothing blocks
           ... compute on what is already here ...
    wait:  Pending.wait()                            what this costs is exposed communication: `blocked_s`
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.progress import Moment, Progress, Wait, seconds_of
from dhp_ray.comm.ranks import torch_peer


class Tag(IntEnum):
    """What a message carries. It keeps apart exchanges that are under way between two ranks at the same time."""

    RING_FORWARD = 0
    RING_BACKWARD = 1
    RING_GRADIENT = 2
    ROWS_FORWARD = 3
    ROWS_BACKWARD = 4


TAGS_PER_PACK = 16


class Link:
    """One pack's members, seen from one of them. Members are positions in `ranks`, the pack's ring order.

    gloo matches a message by pair and tag. NCCL and HCCL ignore tags and match by order, which is the same on both
    sides because every rank runs its packs in plan order. Communicators that share ranks are ordered there too: each
    starts from the current stream, and `wait` makes that stream wait for it before the next pack posts anything.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        pack_index: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank)
        self._group = group
        self._first_tag = pack_index * TAGS_PER_PACK
        self.progress = progress or Progress()
        self._waits: list[Wait] = []
        self._blocked_s = 0.0
        if self.size > 1 and group is None:
            raise ValueError(f"link: ranks {self.ranks} need a process group to exchange through")

    @property
    def blocked_s(self) -> float:
        """Seconds blocked in `wait` so far: of the process on the CPU, of the device's current stream elsewhere.

        On a device this waits until the stream has got this far; read it once, at the end of a pack or of a step.
        """
        self._blocked_s += seconds_of(self._waits)
        self._waits.clear()
        return self._blocked_s

    def taken_waits(self) -> list[Wait]:
        """Return every wait since the last call; `blocked_s` no longer counts them. Does not query the device."""
        waits, self._waits = self._waits, []
        return waits

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Pending:
        """Start sending each (tensor, member) and receiving into each (tensor, member); all are contiguous.

        Tensors without elements are skipped, on both sides: the sizes that two members expect of each other must agree.
        No tensor may be written before `wait`, and received values are there only after it.
        """
        operations = [
            dist.P2POp(call, tensor, torch_peer(self.ranks[member]), group=self._group, tag=self._first_tag + tag)
            for call, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, member in messages if tensor.numel() > 0
        ]
        works = post_together(operations) if operations else []
        return Pending(self, works, [operation.tensor for operation in operations])

    def wait(self, works: Sequence[dist.Work], device: torch.device) -> None:
        """Wait for all of `works`, and count the time. Raises AbortedError after an abort."""
        start = Moment(device)
        with self.progress.waiting("exchange of a pack"):
            for work in works:
                work.wait()
        self._waits.append((start, Moment(device)))


class Pending:
    """An exchange under way. It holds the tensors that it reads and writes until `wait` returns."""

    def __init__(self, link: Link, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        self._link, self._works, self._tensors = link, works, tensors

    def wait(self) -> None:
        """Block until every tensor has been sent and received. A second call does nothing."""
        if self._works:
            self._link.wait(self._works, self._tensors[0].device)
        self._works, self._tensors = (), ()


def post_together(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start the sends and receives of one group together: NCCL and HCCL run them as one operation, so that none waits
    for another.

    torch passes a batch to a backend only if the group is of torch's own type; a group that is written in Python gets
    the batch here.
    """
    batch = getattr(operations[0].group, "batch_isend_irecv", dist.batch_isend_irecv)
    works: list[dist.Work] = batch(operations)
    return works
