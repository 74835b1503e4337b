"""Context-parallel causal attention: a ring over the members of a pack (Ring Attention, arXiv 2310.01889).

Each member keeps its queries and passes keys and values on. At step s a member computes with the shard of member - s
and, at the same time, sends that shard to its right neighbour. Degree 4, member 1, forward:

    step      0             1             2             3
    compute   shard 1       shard 0       shard 3       shard 2
    receive   shard 0       shard 3       shard 2       -

The outputs of the steps are merged by their log-sum-exp. In the backward pass keys and values go round again. The
gradient of each shard follows one step behind the shard and sums up the members' contributions; after one full turn it
is back at its owner.

Within a sliding window (`window.py`) nothing goes round: members exchange the few keys and values that they look back
on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator, Pending, Tag, exchange_rows
from dhp_ray.model.layout import PackLayout
from dhp_ray.model.pieces import Pieces
from dhp_ray.model.recomputation import attention_once
from dhp_ray.model.segment_attention import Kernel, Segments, add_rows, kernel_for, segment_attention
from dhp_ray.model.window import Window

NAME = "dhp_ring"


@dataclass
class PackContext:
    """The pack that an attention call belongs to: its layout, and the link to its other members (None at degree 1).

    It is an argument of the attention, not a global, so that recomputation in the backward pass uses the right pack.

    differentiable: whether any member has a trainable parameter upstream of attention. The backward pass exchanges too,
    so it must run on all members or on none, whatever the inputs of a single member require.
    segments: the result of `segments_of` for this member, on the device that computes; made here by default.
    dropout_keys: (L,), keys of the member's tokens, or (1,) if L is 0; None without dropout.
    pieces: for layers that carry a state from token to token, on the device that computes. window: for layers that
    attend within a sliding window.
    """

    layout: PackLayout
    link: PackCommunicator | None = None
    differentiable: bool = True
    segments: tuple[Segments, ...] = ()
    dropout_keys: Tensor | None = None
    pieces: Pieces | None = None
    window: Window | None = None

    def __post_init__(self) -> None:
        size = 1 if self.link is None else self.link.size
        if size != self.layout.degree:
            raise ValueError(f"pack: a layout of degree {self.layout.degree} and a link of {size} members")
        self.segments = self.segments or segments_of(self.layout, self.member)

    @property
    def member(self) -> int:
        return 0 if self.link is None else self.link.index

    def move(self, device: torch.device) -> None:
        """Copy the segments, the pieces and the window to a device unless they are there."""
        self.segments = tuple(segments.to(device) for segments in self.segments)
        self.dropout_keys = None if self.dropout_keys is None else self.dropout_keys.to(device)
        if self.pieces is not None and self.pieces.chunk_rows.device != device:
            self.pieces = self.pieces.map(lambda tensor: tensor.to(device))
        if self.window is not None and self.window.segments[0].query_offsets_tensor.device != device:
            self.window = self.window.map(lambda tensor: tensor.to(device))


def segments_of(layout: PackLayout, member: int) -> tuple[Segments, ...]:
    """The attention of a member's queries to every member's keys, one entry for each member; on the CPU."""
    return tuple(Segments.of(layout.blocks(member, source)) for source in range(layout.degree))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, context: PackContext) -> Tensor:
    """Causal attention within each sequence of the pack, over all of its members.

    q: (1, H, L, D), k and v: (1, Hk, L, D): this member's L local tokens, in the order of `layout.index(member)`; L may
    be 0. H is a multiple of Hk. scale: factor of the products of queries and keys, commonly D ** -0.5. Returns
    (1, L, H, D). All members must call this, forward and backward; docs/parts.md has an example. ValueError: q, k or v
    do not have this member's number of tokens.
    """
    query, key, value = _rows_of(q, k, v, context)
    if context.layout.degree == 1 and len(query):  # no sums over steps, no exchange
        return segment_attention(query, key, value, context.segments[0], scale, kept=True)[None]
    requires_grad = q.requires_grad or k.requires_grad or v.requires_grad
    anchor = torch.zeros((), requires_grad=True) if context.differentiable and not requires_grad else None
    return _RingAttention.apply(query, key, value, anchor, scale, context)[None]


def window_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, context: PackContext) -> Tensor:
    """`ring_attention` in which a token attends to the window of `context` alone."""
    query, key, value = _rows_of(q, k, v, context)
    if (window := context.window) is None:
        raise ValueError("attention within a sliding window: the pack's context has no window; allowed: window_of(...)")
    rows = torch.stack((key, value), 1)
    if window.exchanges:
        assert context.link is not None
        received = exchange_rows(rows.flatten(1), window.send_rows, window.receive_counts, context.link,
                                 differentiable=context.differentiable)
        rows = torch.cat((rows, received.view(-1, *rows.shape[1:])))
    return _WindowAttention.apply(query, rows.transpose(0, 1), scale, window)[None]


def _rows_of(q: Tensor, k: Tensor, v: Tensor, context: PackContext) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as (L, heads, D), of all tokens that this member has."""
    num_tokens = context.layout.num_tokens(context.member)
    if q.shape[0] != 1 or q.shape[2] != num_tokens or k.shape[2] != num_tokens:
        raise ValueError(
            f"ring attention: queries {tuple(q.shape)}, keys {tuple(k.shape)}; wanted (1, heads, {num_tokens}, width)"
        )
    context.move(q.device)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    return query, key, value


def attention_of_layer(
    q: Tensor, k: Tensor, v: Tensor, scale: float, context: PackContext, in_window: bool = False
) -> Tensor:
    """`ring_attention` or `window_attention` for a layer. A member that holds no token of the pack passes one idle
    token, so that its layers run; no token attends to it, and it attends to none.
    """
    attention = window_attention if in_window else ring_attention
    if context.layout.num_tokens(context.member):
        return attention(q, k, v, scale, context)
    nothing = attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], scale, context)
    return torch.cat((nothing, nothing.new_zeros(1, q.shape[2], *nothing.shape[2:])), 1)


def register() -> None:
    """Register `dhp_ring` with transformers; `set_attn_implementation` selects it for a model. It gets no function for
    masks, so transformers makes none: the layout defines which tokens attend to which.

    The pack is passed as `context=` to the language model, which hands it down to every attention layer.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention_of_transformers)


def _attention_of_transformers(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    context: PackContext | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if context is None:
        raise ValueError(f"attention {NAME}: the model was called without context=PackContext(...)")
    if attention_mask is not None or dropout != 0.0:
        raise ValueError(f"attention {NAME}: causal attention only, without mask or dropout (got {dropout})")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_of_layer(query, key, value, scale, context, sliding_window is not None), None


class _RingAttention(torch.autograd.Function):
    """q: (L, H, D), k and v: (L, Hk, D) -> (L, H, D). Sums over steps are in fp32 for any input type."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, anchor: Tensor | None, scale: float, context: PackContext
    ) -> Tensor:
        kv = torch.stack((k, v))
        out, lse = attention_once(lambda: _merged(q, scale, (
            (context.segments[source], shard) for source, shard in _travelling(kv, context, Tag.RING_FORWARD))))
        ctx.save_for_backward(q, kv, out, lse)
        ctx.scale, ctx.context = scale, context
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        context: PackContext = ctx.context
        kernel, wide = kernel_for(q.device), lse.dtype
        d_q, d_kv = q[:0].to(wide), kv[:, :0].to(wide)  # all that there is without a token
        pending: Pending | None = None
        for source, shard in _travelling(kv, context, Tag.RING_BACKWARD):
            segments = context.segments[source]
            if len(segments):
                part_q, part_k, part_v = _backward(kernel, gradient, q, shard, out, lse, segments, ctx.scale)
                if source == context.member:  # the first, in which every token attends to itself
                    d_q, d_kv = part_q.to(wide), torch.stack((part_k, part_v)).to(wide)
                else:
                    add_rows(d_q, segments.query_rows, part_q)
            if pending is not None:
                pending.wait()
            if len(segments) and source != context.member:
                add_rows(d_kv[0], segments.key_rows, part_k)
                add_rows(d_kv[1], segments.key_rows, part_v)
            if context.link is not None and context.link.size > 1:
                d_kv, pending = _pass_right(d_kv, source, context, context.link, Tag.RING_GRADIENT)
        if pending is not None:
            pending.wait()
        return d_q.to(q.dtype), d_kv[0].to(q.dtype), d_kv[1].to(q.dtype), None, None, None


class _WindowAttention(torch.autograd.Function):
    """q: (L, H, D), kv: (2, L + received, Hk, D) -> (L, H, D). Sums are in fp32 for any input type."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, scale: float, window: Window) -> Tensor:
        out, lse = attention_once(lambda: _merged(q, scale, ((segments, kv) for segments in window.segments)))
        ctx.save_for_backward(q, kv, out, lse)
        ctx.scale, ctx.segments = scale, window.segments
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        d_q, d_kv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
        for segments in filter(len, ctx.segments):
            part_q, part_k, part_v = _backward(kernel_for(q.device), gradient, q, kv, out, lse, segments, ctx.scale)
            add_rows(d_q, segments.query_rows, part_q)
            add_rows(d_kv[0], segments.key_rows, part_k)
            add_rows(d_kv[1], segments.key_rows, part_v)
        return d_q.to(q.dtype), d_kv.to(q.dtype), None, None


def _merged(q: Tensor, scale: float, parts: Iterable[tuple[Segments, Tensor]]) -> tuple[Tensor, Tensor]:
    """The output (L, H, D) and the log-sum-exp (H, L) of queries over the keys and values (2, Lk, Hk, D) of all parts;
    in the first one every token attends to itself.
    """
    kernel, wide = kernel_for(q.device), torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty((q.shape[1], q.shape[0]), dtype=wide)
    for place, (segments, shard) in enumerate(parts):
        if len(segments):
            shard_k, shard_v = shard[:, segments.key_rows]
            part, part_lse = kernel.forward(q[segments.query_rows], shard_k, shard_v, segments, scale)
            if place == 0:  # all of `out` is written
                out, lse = part.to(wide), part_lse
            else:
                _merge(out, lse, part, part_lse, segments)
    return out.to(q.dtype), lse


def _backward(
    kernel: Kernel, gradient: Tensor, q: Tensor, shard: Tensor, out: Tensor, lse: Tensor, segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a part's queries, keys and values (2, Lk, Hk, D): of the rows that its segments gather."""
    rows, (shard_k, shard_v) = segments.query_rows, shard[:, segments.key_rows]
    return kernel.backward(gradient[rows], q[rows], shard_k, shard_v, out[rows], lse[:, rows], segments, scale)


def _travelling(shard: Tensor, context: PackContext, tag: Tag) -> Iterator[tuple[int, Tensor]]:
    """Yield (member, its shard) for every member, starting with this one. The next shard is received while the caller
    computes with the current one.

    shard: (2, L, Hk, D), keys and values in one buffer, so that a step needs one message.
    """
    degree = context.layout.degree
    for step in range(degree - 1):
        assert context.link is not None
        source = (context.member - step) % degree
        arriving, pending = _pass_right(shard, source, context, context.link, tag)
        yield source, shard
        pending.wait()
        shard = arriving
    yield (context.member + 1) % degree, shard


def _pass_right(
    shard: Tensor, source: int, context: PackContext, link: PackCommunicator, tag: Tag
) -> tuple[Tensor, Pending]:
    """Start sending `source`'s shard to the right; return the buffer that receives the next shard from the left."""
    num_tokens = context.layout.num_tokens((source - 1) % link.size)
    arriving = shard.new_empty((2, num_tokens, *shard.shape[2:]))
    return arriving, link.exchange([(shard, (link.index + 1) % link.size)], [(arriving, (link.index - 1) % link.size)],
                                   tag)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, segments: Segments) -> None:
    """Merge one step's output (Lq, H, D) and log-sum-exp (H, Lq) into those of the steps before, in place.

    softmax over the union of two sets of keys weighs each set's output by exp(its lse - the lse of the union).
    """
    rows = segments.query_rows
    before = lse[:, rows]
    union = torch.logaddexp(before, part_lse)
    here = out[rows]  # where they are a slice it is not a copy
    here.mul_(_weights(before - union)).addcmul_(part, _weights(part_lse - union))
    lse[:, rows] = union
    if not isinstance(rows, slice):
        out[rows] = here


def _weights(log_weights: Tensor) -> Tensor:
    """exp of (H, L) as (L, H, 1), to weigh (L, H, D)."""
    return log_weights.exp().t()[..., None]
