"""Ascend NPU: torch_npu's fused attention in its variable-length layout TND, up to 1,024 segments a call; its grouped
product; its fused norm, rotation and SwiGLU.

Written against the operators of torch_npu 2.13 (tests/contracts/torch_npu.yaml); not yet run on a device. Offsets are
cumulative without a leading 0. Causal is sparse_mode 3 with a fixed 2048 x 2048 mask, True where masked, whatever the
lengths are. The softmax's maximum and sum come apart, (T, N, 8) with the last axis repeated: lse = maximum + log(sum).
Unless asked for in TND as well, they lie in memory as (N, S, 8) of one segment after the other, in spite of that shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dhp_ray.model.segment_attention import Segments, concatenate

MAX_SEGMENTS = 1024
"""Of a call in TND: its lists of lengths may be no longer."""


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    import torch_npu

    outs, lses = [], []
    for rows, key_rows, options in _calls(segments, q.device):
        out, maximum, total, *_ = torch_npu.npu_fusion_attention(
            q[rows], k[key_rows], v[key_rows], q.shape[1], "TND", scale=scale, **options)
        outs.append(out)
        lses.append((maximum[..., 0] + total[..., 0].log()).t())
    return concatenate(outs), concatenate(lses, dim=1)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    import torch_npu

    parts = []
    for rows, key_rows, options in _calls(segments, q.device):
        # exp(score - maximum) / total with the merged lse as maximum and a total of 1 are the merged probabilities.
        maximum = lse[:, rows].t()[..., None].expand(-1, -1, 8).contiguous()
        d_q, d_k, d_v, *_ = torch_npu.npu_fusion_attention_grad(
            q[rows], k[key_rows], v[key_rows], gradient[rows].contiguous(), q.shape[1], "TND", softmax_max=maximum,
            softmax_sum=torch.ones_like(maximum), attention_in=out[rows].contiguous(), scale_value=scale, **options)
        parts.append((d_q, d_k, d_v))
    d_q, d_k, d_v = (concatenate(gradients) for gradients in zip(*parts))
    return d_q, d_k, d_v


def grouped_products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _grouped(x, weight, ends, group_type=0)


def grouped_sums(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return _grouped(x.t(), y, ends, group_type=2)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, group_type: int) -> Tensor:
    """group_type 0: of the rows of x; 2: of those of both, which are added up."""
    import torch_npu

    return torch_npu.npu_grouped_matmul([x], [weight], group_list=ends.long(), split_item=3, group_type=group_type,
                                        group_list_type=0)[0]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    import torch_npu

    return torch_npu.npu_rms_norm(x, weight, epsilon)[0]


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    import torch_npu

    # the operator's layout BSND, in which projections leave queries and keys: no copy is made
    q, k = (torch_npu.npu_rotary_mul(x.transpose(1, 2), cos[:, :, None], sin[:, :, None]).transpose(1, 2)
            for x in (q, k))
    return q, k


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    import torch_npu

    return torch_npu.npu_swiglu(torch.cat((gate, up), -1), -1)


def _calls(segments: Segments, device: torch.device) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """The rows of queries and of keys of each call, and the arguments that both operators have."""
    options = {"atten_mask": _causal_mask(device) if segments.causal else None,
               "sparse_mode": 3 if segments.causal else 0, "softmax_layout": "TND"}
    for first in range(0, len(segments), MAX_SEGMENTS):
        queries = segments.query_offsets[first:first + MAX_SEGMENTS + 1]
        keys = segments.key_offsets[first:first + MAX_SEGMENTS + 1]
        yield slice(queries[0], queries[-1]), slice(keys[0], keys[-1]), options | {
            "actual_seq_qlen": [offset - queries[0] for offset in queries[1:]],
            "actual_seq_kvlen": [offset - keys[0] for offset in keys[1:]]}


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
