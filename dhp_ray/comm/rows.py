"""Exchange of rows among the members of a pack, differentiable: each member gets the rows that it needs of every other.

Used for vision features: the member that encoded an image owns its rows, the members that hold its tokens need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dhp_ray.comm.link import Link, Tag


def exchange_rows(
    rows: Tensor,
    send_index: Sequence[Tensor],
    receive_counts: Sequence[int],
    link: Link,
    *,
    differentiable: bool = True,
) -> Tensor:
    """The rows that this member needs: (sum(receive_counts), F), those of member 0 first, its own copied.

    rows: (N, F), the rows that this member owns; N may be 0, F and dtype are alike on all members.
    send_index: for every member, positions within `rows` (long, on their device) that it needs, in the order in which
    it wants them.
    receive_counts: for every member, how many of its rows this member needs.

    The backward sends each row's gradient to its owner, who sums them. It is an exchange too, so either all members run
    it or none: pass `differentiable=True` on all when any trainable parameter is upstream of `rows` on any of them, and
    keep the result in the graph even when it has no rows.
    """
    if len(send_index) != link.size or len(receive_counts) != link.size:
        raise ValueError(
            f"exchange of rows: {len(send_index)} send indices and {len(receive_counts)} counts for {link.size} members"
        )
    if len(send_index[link.index]) != receive_counts[link.index]:
        raise ValueError(
            f"exchange of rows: member {link.index} keeps {len(send_index[link.index])} of its own rows and expects "
            f"{receive_counts[link.index]}"
        )
    # A member without images has no input that requires a gradient; the anchor makes autograd call its backward.
    anchor = torch.zeros((), requires_grad=True) if differentiable and not rows.requires_grad else None
    exchanged: Tensor = _ExchangeRows.apply(rows, anchor, tuple(send_index), tuple(receive_counts), link)
    return exchanged


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        anchor: Tensor | None,
        send_index: tuple[Tensor, ...],
        receive_counts: tuple[int, ...],
        link: Link,
    ) -> Tensor:
        ctx.send_index, ctx.receive_counts, ctx.link, ctx.num_rows = send_index, receive_counts, link, rows.shape[0]
        received = rows.new_empty((sum(receive_counts), rows.shape[1]))
        sent = [rows[index] for index in send_index]
        _exchange(sent, list(received.split(receive_counts)), link, Tag.ROWS_FORWARD)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        link: Link = ctx.link
        sent = list(gradient.contiguous().split(ctx.receive_counts))
        received = [gradient.new_empty((len(index), gradient.shape[1])) for index in ctx.send_index]
        _exchange(sent, received, link, Tag.ROWS_BACKWARD)
        if not ctx.needs_input_grad[0]:
            return (None,) * 5
        total = gradient.new_zeros((ctx.num_rows, gradient.shape[1]))
        for index, part in zip(ctx.send_index, received):
            total.index_add_(0, index, part)
        return total, None, None, None, None


def _exchange(sent: list[Tensor], received: list[Tensor], link: Link, tag: Tag) -> None:
    """Send `sent[member]` to, and fill `received[member]` from, every member; copy what stays here meanwhile."""
    others = [member for member in range(link.size) if member != link.index]
    pending = link.exchange([(sent[member], member) for member in others],
                            [(received[member], member) for member in others], tag)
    received[link.index].copy_(sent[link.index])
    pending.wait()
