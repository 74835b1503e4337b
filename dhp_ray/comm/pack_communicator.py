"""Point-to-point exchange among the members of one pack.

    post:  exchange(sends, receives) -> Pending      both directions at once, nothing blocks
           ... compute on what is already here ...
    wait:  Pending.wait()                            what this costs is exposed communication: `Progress.timed_waits`

Vision features are exchanged by rows: the member that encoded an image owns its rows, the members that hold its tokens
need them, and gradients go back by the same routes. Inside a pack autograd sends them back (`exchange_rows`); apart
from packs, that is a phase of its own (`send_rows`, `return_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import torch_peer


class Tag(IntEnum):
    """What a message carries. It keeps apart exchanges that are under way between two ranks at the same time."""

    RING_FORWARD = 0
    RING_BACKWARD = 1
    RING_GRADIENT = 2
    ROWS_FORWARD = 3
    ROWS_BACKWARD = 4
    ROUTING = 5
    STATES_FORWARD = 6
    STATES_BACKWARD = 7


TAGS_PER_PACK = 16


class PackCommunicator:
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
        return Pending(self.progress, works, [operation.tensor for operation in operations])


class Pending:
    """An exchange under way. It holds the tensors that it reads and writes until `wait` returns."""

    def __init__(self, progress: Progress, works: Sequence[dist.Work], tensors: Sequence[Tensor]) -> None:
        self._progress, self._works, self._tensors = progress, works, tensors

    def wait(self) -> None:
        """Block until every tensor has been sent and received. A second call does nothing. Raises AbortedError after an
        abort.
        """
        if self._works:
            with self._progress.waiting("exchange of a pack"):
                for work in self._works:
                    work.wait()
        self._works, self._tensors = (), ()


def post_together(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start the sends and receives of one group together: NCCL and HCCL run them as one operation, so that none waits
    for another.

    torch passes a batch to a backend only if the group is of torch's own type; a group that is written in Python gets
    the batch here.
    """
    batch = getattr(operations[0].group, "batch_isend_irecv", dist.batch_isend_irecv)
    return batch(operations)


def exchange_rows(
    rows: Tensor,
    send_index: Sequence[Tensor],
    receive_counts: Sequence[int],
    link: PackCommunicator,
    *,
    differentiable: bool = True,
) -> Tensor:
    """Return the rows that this member needs: (sum(receive_counts), F), those of member 0 first; its own are copied.

    rows: (N, F), the rows that this member owns; N may be 0, F and dtype are alike on all members.
    send_index: for every member, positions within `rows` (long, on their device) that it needs, in the order in which
    it wants them.
    receive_counts: for every member, how many of its rows this member needs.

    The backward sends each row's gradient to its owner, which sums them. It is an exchange too, so either all members
    run it or none: pass `differentiable=True` on all when any trainable parameter is upstream of `rows` on any of them,
    and keep the result in the graph even when it has no rows.
    """
    # A member without images has no input that requires a gradient; the anchor makes autograd call its backward.
    anchor = torch.zeros((), requires_grad=True) if differentiable and not rows.requires_grad else None
    return _ExchangeRows.apply(rows, anchor, dict(enumerate(send_index)), dict(enumerate(receive_counts)), link)


def send_rows(
    rows: Tensor, send_index: Mapping[int, Tensor], receive_counts: Mapping[int, int], link: PackCommunicator
) -> Tensor:
    """Return the rows (sum of counts, F) that this member receives, those of the lowest member first; its own are
    copied.

    `send_index`: by member, positions within `rows` (N, F) that it needs; `receive_counts`: by member, in ascending
    order, how many of its rows come here. A member that is in neither takes no part.
    """
    received = rows.new_empty((sum(receive_counts.values()), rows.shape[1]))
    sent = {member: rows[index] for member, index in send_index.items()}
    _exchange(sent, _pieces(received, receive_counts), link, Tag.ROWS_FORWARD)
    return received


def return_rows(
    gradient: Tensor, send_index: Mapping[int, Tensor], receive_counts: Mapping[int, int], num_rows: int,
    link: PackCommunicator,
) -> Tensor:
    """Return the gradient (num_rows, F) of `send_rows`' rows, from that of its result, by the same routes."""
    received = {member: gradient.new_empty((len(index), gradient.shape[1])) for member, index in send_index.items()}
    _exchange(_pieces(gradient.contiguous(), receive_counts), received, link, Tag.ROWS_BACKWARD)
    total = gradient.new_zeros((num_rows, gradient.shape[1]))
    for member, index in send_index.items():
        total.index_add_(0, index, received[member])
    return total


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        anchor: Tensor | None,
        send_index: Mapping[int, Tensor],
        receive_counts: Mapping[int, int],
        link: PackCommunicator,
    ) -> Tensor:
        ctx.send_index, ctx.receive_counts, ctx.link, ctx.num_rows = send_index, receive_counts, link, rows.shape[0]
        return send_rows(rows, send_index, receive_counts, link)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = return_rows(gradient, ctx.send_index, ctx.receive_counts, ctx.num_rows, ctx.link)
        return total if ctx.needs_input_grad[0] else None, None, None, None, None


def _pieces(rows: Tensor, counts: Mapping[int, int]) -> dict[int, Tensor]:
    return dict(zip(counts, rows.split(list(counts.values()))))


def _exchange(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], link: PackCommunicator, tag: Tag) -> None:
    """Send `sent[member]` to, and fill `received[member]` from, every member; copy what stays here meanwhile."""
    pending = link.exchange([(rows, member) for member, rows in sent.items() if member != link.index],
                            [(rows, member) for member, rows in received.items() if member != link.index], tag)
    if link.index in received:
        received[link.index].copy_(sent[link.index])
    pending.wait()
