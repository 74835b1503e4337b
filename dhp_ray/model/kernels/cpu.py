"""CPU: torch's flash kernel, one call for each run of neighbouring segments of equal lengths. It takes grouped-query
heads and returns the log-sum-exp. Grouped products are one product after another.

Always in fp32 or wider: its bf16 backward dies of an illegal instruction on hosts that list AMX but forbid it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from dhp_ray.model.segment_attention import Segments, concatenate

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    outs, lses, wide = [], [], _wide(q.dtype)
    for number, query, key in segments.runs:
        out, lse = _forward(_batch(q[query], number, wide), _batch(k[key], number, wide), _batch(v[key], number, wide),
                            0.0, segments.causal, scale=scale)
        outs.append(_rows(out))
        lses.append(lse.transpose(0, 1).flatten(1))
    return concatenate(outs).to(q.dtype), concatenate(lses, dim=1)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    parts, wide = [], _wide(q.dtype)
    for number, query, key in segments.runs:
        gradients = _backward(_batch(gradient[query], number, wide), _batch(q[query], number, wide),
                              _batch(k[key], number, wide), _batch(v[key], number, wide),
                              _batch(out[query], number, wide),
                              lse[:, query].view(len(lse), number, -1).transpose(0, 1), 0.0, segments.causal,
                              scale=scale)
        parts.append([_rows(x) for x in gradients])
    d_q, d_k, d_v = (concatenate(gradients) for gradients in zip(*parts))
    return d_q, d_k, d_v


def grouped_products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(len(x), weight.shape[2])
    for number, rows in _groups(ends):
        torch.mm(x[rows], weight[number], out=out[rows])
    return out


def grouped_sums(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    out = x.new_zeros(len(ends), x.shape[1], y.shape[1])
    for number, rows in _groups(ends):
        torch.mm(x[rows].t(), y[rows], out=out[number])
    return out


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The number and the rows of each group that has any."""
    for number, (start, stop) in enumerate(pairwise((0, *ends.tolist()))):
        if start < stop:
            yield number, slice(start, stop)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _batch(x: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    """(N L, H, D) of N segments -> (N, H, L, D), a view where the type allows."""
    return x.to(dtype).view(number, -1, *x.shape[1:]).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """(N, H, L, D) -> (N L, H, D), a view of what torch's operators give."""
    return x.transpose(1, 2).flatten(0, 1)
