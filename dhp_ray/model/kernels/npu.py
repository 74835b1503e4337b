"""Ascend NPU: torch_npu's fused attention in its variable-length layout TND, one call for all segments.

Written against the documented signatures of torch_npu 2.13; not yet run on a device. Offsets are cumulative without a
leading 0. Causal is sparse_mode 3 with a fixed 2048 x 2048 mask, True where masked, whatever the lengths are.
The softmax's maximum and sum come apart, (T, N, 8) with the last axis repeated: lse = maximum + log(sum).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dhp_ray.model.kernels.segments import Segments


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    import torch_npu

    out, maximum, total, *_ = torch_npu.npu_fusion_attention(
        q, k, v, q.shape[1], "TND", scale=scale, **_options(segments, q.device))
    return out, (maximum[..., 0] + total[..., 0].log()).t()


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    import torch_npu

    # exp(score - maximum) / total with the merged lse as maximum and a total of 1 are the merged probabilities.
    maximum = lse.t()[..., None].expand(-1, -1, 8).contiguous()
    d_q, d_k, d_v, *_ = torch_npu.npu_fusion_attention_grad(
        q, k, v, gradient.contiguous(), q.shape[1], "TND", softmax_max=maximum, softmax_sum=torch.ones_like(maximum),
        attention_in=out.contiguous(), scale_value=scale, **_options(segments, q.device))
    return d_q, d_k, d_v


def _options(segments: Segments, device: torch.device) -> dict[str, Any]:
    return {"actual_seq_qlen": segments.query_offsets[1:], "actual_seq_kvlen": segments.key_offsets[1:],
            "atten_mask": _causal_mask(device) if segments.causal else None, "sparse_mode": 3 if segments.causal else 0}


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
