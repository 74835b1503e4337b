"""CPU: torch's flash kernel, one call a segment. It takes grouped-query heads and returns the log-sum-exp.

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
    for query, key in segments.pairs():
        part, part_lse = _forward(_batch(q[query], wide), _batch(k[key], wide), _batch(v[key], wide), 0.0,
                                  segments.causal, scale=scale)
        out[query] = _unbatch(part)
        lse[:, query] = part_lse[0]
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(q.dtype)
    gradients = tuple(torch.empty_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
    for query, key in segments.pairs():
        parts = _backward(_batch(gradient[query], wide), _batch(q[query], wide), _batch(k[key], wide),
                          _batch(v[key], wide),
                          _batch(out[query], wide), lse[None, :, query], 0.0, segments.causal, scale=scale)
        for whole, rows, part in zip(gradients, (query, key, key), parts):
            whole[rows] = _unbatch(part)
    return gradients[0], gradients[1], gradients[2]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _batch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(L, H, D) -> (1, H, L, D), a view where the type allows."""
    return x.to(dtype).transpose(0, 1)[None]


def _unbatch(x: Tensor) -> Tensor:
    """(1, H, L, D) -> (L, H, D), a view."""
    return x[0].transpose(0, 1)
