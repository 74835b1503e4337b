"""CPU: torch's flash kernel, one call for each run of neighbouring segments of equal lengths. It takes grouped-query
heads and returns the log-sum-exp.

Always in fp32 or wider: its bf16 backward dies of an illegal instruction on hosts that list AMX but forbid it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dhp_ray.model.kernels.segments import Segments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    wide = _wide(q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=wide)
    for number, query, key in segments.runs():
        part, part_lse = _forward(_batch(q[query], number, wide), _batch(k[key], number, wide),
                                  _batch(v[key], number, wide), 0.0, segments.causal, scale=scale)
        _batch(out[query], number).copy_(part)
        _batch_of_lse(lse[:, query], number).copy_(part_lse)
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(q.dtype)
    gradients = tuple(torch.empty_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
    for number, query, key in segments.runs():
        parts = _backward(_batch(gradient[query], number, wide), _batch(q[query], number, wide),
                          _batch(k[key], number, wide), _batch(v[key], number, wide), _batch(out[query], number, wide),
                          _batch_of_lse(lse[:, query], number), 0.0, segments.causal, scale=scale)
        for whole, rows, part in zip(gradients, (query, key, key), parts):
            _batch(whole[rows], number).copy_(part)
    return gradients[0], gradients[1], gradients[2]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _batch(x: Tensor, number: int, dtype: torch.dtype | None = None) -> Tensor:
    """(N L, H, D) of N segments -> (N, H, L, D), a view where the type allows."""
    return x.to(dtype or x.dtype).unflatten(0, (number, -1)).transpose(1, 2)


def _batch_of_lse(x: Tensor, number: int) -> Tensor:
    """(H, N L) of N segments -> (N, H, L), a view."""
    return x.unflatten(1, (number, -1)).transpose(0, 1)
