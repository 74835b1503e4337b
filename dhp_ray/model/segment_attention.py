"""Attention within segments of rows that one device holds, by the kernels of `kernels/`: one call forward, one
backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dhp_ray.model.kernels import Segments, kernel_for


def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """Each segment's queries attend to its keys: (L, H, D) for q (L, H, D), k and v (Lk, Hk, D), H a multiple of Hk.

    `segments` cover all L and Lk rows, one after the other, on the device of q. scale: what products of queries and
    keys are multiplied with.

    Raises:
        ValueError: the segments are of other rows than q and k have.
    """
    if (segments.query_offsets[-1], segments.key_offsets[-1]) != (len(q), len(k)):
        raise ValueError(f"segment attention: {len(q)} queries and {len(k)} keys; the segments have "
                         f"{segments.query_offsets[-1]} and {segments.key_offsets[-1]}")
    out: Tensor = _SegmentAttention.apply(q, k, v, segments, scale)
    return out


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        out, lse = kernel_for(q.device).forward(q, k, v, segments, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        parts = kernel_for(q.device).backward(gradient, q, k, v, out, lse, ctx.segments, ctx.scale)
        return *(part.to(q.dtype) for part in parts), None, None
