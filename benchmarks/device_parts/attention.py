"""Ring attention at degree 1, as the model calls it, beside plain flash attention on the same pack.

FLOPs are those of the scores that the causal mask leaves: 4 H D a pair forward, 10 H D backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.device_parts.record import CheckError, Record
from benchmarks.device_parts.settings import Settings
from benchmarks.device_parts.timing import compute_type, matrix_rate, seconds_of
from dhp_ray.model.attention import PackContext, ring_attention
from dhp_ray.model.layout import PackLayout

PACKS = {
    "cuda": {"1 x 8k": [8192], "1 x 32k": [32768], "8 x 1k": [1024] * 8, "32 x 1k": [1024] * 32,
             "256 x 128": [128] * 256, "16k to 128": [16384, 8192, 4096, 2048, 1024, 512, 256, 128, 128]},
    "cpu": {"1 x 256": [256], "8 x 32": [32] * 8, "128 to 1": [128, 64, 32, 16, 8, 4, 2, 1, 1]},
}
"""Lengths of the sequences of every pack, by name."""
HEADS = {"cuda": (16, 2, 128), "cpu": (4, 2, 32)}
"""Of queries, of keys, and their width: Qwen2.5-VL-3B's; the preset tiny's."""
LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Of output and gradients together, by their norm, between ours and plain."""
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measured:
    """Seconds of a forward and of a backward pass; output and gradients."""

    forward_s: float
    backward_s: float
    tensors: tuple[Tensor, ...]


def run(settings: Settings, record: Record) -> str:
    device = torch.device(settings.device)
    rate = matrix_rate(device)
    heads, key_heads, width = HEADS[device.type]
    record.tree["matrix_rate_tflops"] = rate / 1e12
    record.table(["pack", "plain", "forward ms", "ratio to plain", "share of matrix rate", "backward ms",
                  "ratio to plain", "share", "error"])
    wrong = []
    for name, lengths in PACKS[device.type].items():
        torch.manual_seed(0)
        shapes = [(sum(lengths), count, width) for count in (heads, key_heads, key_heads, heads)]
        q, k, v, slope = (torch.randn(shape, device=device).to(compute_type(device)) for shape in shapes)
        ours = measured(ring_of(lengths, width), (q, k, v), slope)
        others, refused = {}, {}
        for kind, call in plain_of(lengths, device).items():
            try:
                others[kind] = measured(call, (q, k, v), slope)
            except (RuntimeError, TypeError, ValueError) as said:
                refused[kind] = str(said).split("\n")[0][:200]
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        shares = [flops * heads * width * pairs / seconds / rate
                  for flops, seconds in ((4, ours.forward_s), (10, ours.backward_s))]
        figures = {"lengths": lengths, "refused": refused, "forward_s": ours.forward_s, "backward_s": ours.backward_s,
                   "forward_share": shares[0], "backward_share": shares[1]}
        if not others:
            wrong.append(f"{name}: no plain attention runs ({'; '.join(refused.values())})")
            record.row(name, figures, [name, "none", f"{1e3 * ours.forward_s:.3f}", "-", f"{shares[0]:.2f}",
                                       f"{1e3 * ours.backward_s:.3f}", "-", f"{shares[1]:.2f}", "-"])
            continue
        kind = min(others, key=lambda kind: others[kind].forward_s + others[kind].backward_s)
        plain, error = others[kind], error_between(ours.tensors, others[kind].tensors)
        ratios = [ours.forward_s / plain.forward_s, ours.backward_s / plain.backward_s]
        record.row(name, {**figures, "plain": kind, "plain_forward_s": plain.forward_s,
                          "plain_backward_s": plain.backward_s, "error": error},
                   [name, kind, f"{1e3 * ours.forward_s:.3f}", f"{ratios[0]:.2f}", f"{shares[0]:.2f}",
                    f"{1e3 * ours.backward_s:.3f}", f"{ratios[1]:.2f}", f"{shares[1]:.2f}", f"{error:.0e}"])
        if not error < LARGEST_ERROR[q.dtype]:
            wrong.append(f"{name}: {error:.1e} off plain attention, allowed: below {LARGEST_ERROR[q.dtype]}")
    if wrong:
        raise CheckError("; ".join(wrong))
    return f"matrix rate {rate / 1e12:.4g} TFLOP/s"


def measured(call: Call, inputs: Sequence[Tensor], slope: Tensor) -> Measured:
    """`inputs` are q (L, H, D), k and v (L, Hk, D); `slope` the gradient of the output (L, H, D)."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = call(*leaves)
    gradients = torch.autograd.grad(out, leaves, slope, retain_graph=True)
    with torch.no_grad():
        forward_s = seconds_of(lambda: call(*leaves), slope.device)
    backward_s = seconds_of(lambda: torch.autograd.grad(out, leaves, slope, retain_graph=True), slope.device)
    return Measured(forward_s, backward_s, (out.detach(), *gradients))


def ring_of(lengths: Sequence[int], width: int) -> Call:
    context = PackContext(PackLayout(tuple(lengths), 1))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))  # heads before tokens, as transformers has it
        return ring_attention(query, key, value, width**-0.5, context).squeeze(0)

    return call


def plain_of(lengths: Sequence[int], device: torch.device) -> dict[str, Call]:
    """Torch's own, by name: one call for all sequences, and a call for each."""

    def each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for first, last in pairwise((0, *accumulate(lengths))):
                query, key, value = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                outs.append(out[0].transpose(0, 1))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    if device.type == "cpu":
        return {"sdpa": each}
    from torch.nn.attention.varlen import varlen_attn

    offsets = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device)
    known = inspect.signature(varlen_attn).parameters  # they differ between versions of torch
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cast(Tensor, varlen_attn(q, k, v, offsets, offsets, max(lengths), max(lengths), **causal, **grouped))

    return {"varlen_attn": together, "sdpa": each} if len(lengths) < 64 else {"varlen_attn": together}


def error_between(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm, of the worst tensor."""
    return max(((one.float() - other.float()).norm() / other.float().norm()).item()
               for one, other in zip(found, wanted))
