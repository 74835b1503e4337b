"""Dropout on the inputs of adapters that does not depend on the plan: sample, position and step decide what is dropped.

    key of a token    32 bits of (seed, step, sample, position in the sample), made on the host with the pack's inputs
    key of a layer    32 bits of its name
    value (t, f)      dropped where half f % 2 of hash(key of t + key of layer, f // 2) is below rate * 2 ** 16

A rank draws no random numbers, so no generators have to stay in step: whichever rank holds a token, and whenever it is
recomputed, the same values are dropped. One hash of 32 bits serves two values, with 16 bits each.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

WEYL = -1640531527  # 2 ** 32 / golden ratio, as int32: its multiples are spread evenly
MIX = ((16, 2146121005), (15, -2073254261))  # shifts and factors of lowbias32 by Wellons: one bit of input changes half


def token_keys(seed: int, step: int, sample_id: str, num_tokens: int) -> Tensor:
    """Keys (num_tokens,) int32 of a sample's tokens in a step."""
    of_sample = _digest(f"{seed} {step} {sample_id}", 8)
    x = np.uint64(of_sample) + np.arange(num_tokens, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((x >> np.uint64(32)).astype(np.uint32).view(np.int32))


def layer_key(name: str) -> int:
    """The int32 key of the layer with this name."""
    return _digest(name, 4) - 2**31


def kept(keys: Tensor, layer: int, width: int, rate: float) -> Tensor:
    """Mask (L, width), bool, of the values that a layer keeps for tokens with `keys` (L,) if it drops the share `rate`.
    """
    pairs = torch.arange((width + 1) // 2, dtype=torch.int32, device=keys.device) * WEYL
    x = (keys + layer)[:, None] ^ pairs
    for shift, factor in MIX:
        x ^= _shifted(x, shift)
        x *= factor
    x ^= _shifted(x, MIX[0][0])
    return (x.view(torch.int16) >= min(round(rate * 2**16), 2**16 - 1) - 2**15)[:, :width]


class DroppedProduct(torch.autograd.Function):
    """Compute (x * kept) weight^T for x (..., in) and weight (rank, in). Saves only x, as a product without dropout
    does, and recomputes the mask in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keys: Tensor, layer: int, rate: float) -> Tensor:
        ctx.save_for_backward(x, weight, keys)
        ctx.layer, ctx.rate = layer, rate
        return _dropped(x, keys, layer, rate) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, keys = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = gradient.flatten(0, -2).t() @ _dropped(x, keys, ctx.layer, ctx.rate).flatten(0, -2)
        if ctx.needs_input_grad[0]:
            of_x = _dropped(gradient @ weight, keys, ctx.layer, ctx.rate)
        return of_x, of_weight, None, None, None


def _dropped(x: Tensor, keys: Tensor, layer: int, rate: float) -> Tensor:
    return x * kept(keys, layer, x.shape[-1], rate).view(x.shape)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Shift x (int32) right as an unsigned number."""
    return (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _digest(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest(), "little")
