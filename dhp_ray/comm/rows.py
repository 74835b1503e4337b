"""Exchange of rows among the members of a link: each gets the rows that it needs from every other one, and their
gradients go back by the same routes.

Used for vision features: the member that encoded an image owns its rows, the members that hold its tokens need them.
Inside a pack, autograd sends the gradients back (`exchange_rows`); apart from packs, that is a phase of its own
(`send_rows`, `return_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Return the rows that this member needs: (sum(receive_counts), F), those of member 0 first; its own are copied.

    rows: (N, F), the rows that this member owns; N may be 0, F and dtype are alike on all members.
    send_index: for every member, positions within `rows` (long, on their device) that it needs, in the order in which
    it wants them.
    receive_counts: for every member, how many of its rows this member needs.

    The backward sends each row's gradient to its owner, which sums them. It is an exchange too, so either all members
    run it or none: pass `differentiable=True` on all when any trainable parameter is upstream of `rows` on any of them,
    and keep the result in the graph even when it has no rows.
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
    exchanged: Tensor = _ExchangeRows.apply(rows, anchor, dict(enumerate(send_index)),
                                             dict(enumerate(receive_counts)), link)
    return exchanged


def send_rows(
    rows: Tensor, send_index: Mapping[int, Tensor], receive_counts: Mapping[int, int], link: Link
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
    gradient: Tensor, send_index: Mapping[int, Tensor], receive_counts: Mapping[int, int], num_rows: int, link: Link
) -> Tensor:
    """Return the gradient (num_rows, F) of the `rows` given to `send_rows`, from the gradient of its result, by the
    same routes.
    """
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
        link: Link,
    ) -> Tensor:
        ctx.send_index, ctx.receive_counts, ctx.link, ctx.num_rows = send_index, receive_counts, link, rows.shape[0]
        return send_rows(rows, send_index, receive_counts, link)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = return_rows(gradient, ctx.send_index, ctx.receive_counts, ctx.num_rows, ctx.link)
        return total if ctx.needs_input_grad[0] else None, None, None, None, None


def _pieces(rows: Tensor, counts: Mapping[int, int]) -> dict[int, Tensor]:
    return dict(zip(counts, rows.split(list(counts.values()))))


def _exchange(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], link: Link, tag: Tag) -> None:
    """Send `sent[member]` to, and fill `received[member]` from, every member; copy what stays here meanwhile."""
    pending = link.exchange([(rows, member) for member, rows in sent.items() if member != link.index],
                            [(rows, member) for member, rows in received.items() if member != link.index], tag)
    if link.index in received:
        received[link.index].copy_(sent[link.index])
    pending.wait()
