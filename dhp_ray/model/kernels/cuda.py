"""CUDA: torch's variable-length flash attention, one call for all segments, and its grouped product; where the extra
`cuda` is installed, Liger's fused norm, rotation and SwiGLU, and flash-linear-attention's gated delta rule (Triton).

The two operators of attention are those that `torch.nn.attention.varlen.varlen_attn` calls in torch 2.13; its public
function returns the log-sum-exp but has no backward that takes a merged one. On Hopper they run FlashAttention 3 where
its package is installed: torch puts its kernels behind the same two operators (not yet run on a device). What is fused
is written against liger-kernel 0.8 (tests/contracts/liger.yaml); tests/model/test_fused.py compares it on a device. So
is the gated delta rule against fla-core 0.6 (fla.yaml, tests/model/test_delta_rule.py), not yet run on a device.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from dhp_ray.compatibility import HAS_FLASH_ATTENTION_3, HAS_TRITON_3_7_1
from dhp_ray.model.segment_attention import Segments


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"train.precision: attention on cuda computes in bf16, got {q.dtype}; allowed: bf16")
    _take_flash_attention_3()
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, segments.query_offsets_tensor, segments.key_offsets_tensor, segments.longest_query,
        segments.longest_key, 0.0, segments.causal, return_debug_mask=False, scale=scale)
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Without dropout the state of the random numbers is not read; the operator wants one all the same.
    random_state, unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        gradient.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), segments.query_offsets_tensor,
        segments.key_offsets_tensor, segments.longest_query, segments.longest_key, 0.0, segments.causal, random_state,
        unused, scale=scale)


@cache
def _take_flash_attention_3() -> None:
    if HAS_FLASH_ATTENTION_3 and find_spec("flash_attn_interface") and torch.cuda.get_device_capability()[0] == 9:
        torch.nn.attention.activate_flash_attention_impl("FA3")


def grouped_products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weight, offs=ends)


def grouped_sums(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x.t(), y, offs=ends)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    # "llama": normalised in fp32, scaled in the type of x, as transformers does. Not in place: that would write over
    # the gradient of the output, which may be another's too.
    return LigerRMSNormFunction.apply(x, weight, epsilon, 0.0, "llama", False)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import LigerRopeFunction

    # it writes over q and k where their heads lie side by side, as a projection leaves them: no backward reads them
    return LigerRopeFunction.apply(q, k, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


@cache
def has_gated_delta_rule() -> bool:
    """Whether this process's device runs `gated_delta_rule`. An older Triton gives wrong gradients on Hopper, which
    flash-linear-attention refuses (its issue 640); on Blackwell it may give NaN (its issue 913).
    """
    return find_spec("fla") is not None and HAS_TRITON_3_7_1 and torch.cuda.get_device_capability()[0] in (8, 9)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, offsets: Tensor, chunks: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs (L, H, values) of sequences one after the other, and the states after them, fp32 (sequences, H, keys,
    values), from those before.

    q and k: (L, Hk, keys), not normed, with H a multiple of Hk; v: (L, H, values); g, the logarithm of the decay, and
    beta: (L, H). offsets: (sequences + 1,) int64, where sequences begin and the last one ends. chunks: (C, 2) int64, of
    each 64 tokens, or fewer at a sequence's end, the sequence and how many such it has before; given, or the kernel
    would read the offsets on the host.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, after = chunk_gated_delta_rule(
        q[None], k[None], v[None], g[None], beta[None], initial_state=states, output_final_state=True,
        use_qk_l2norm_in_kernel=True, cu_seqlens=offsets, chunk_indices=chunks)
    return out.squeeze(0), after
