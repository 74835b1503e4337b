"""Seconds of a pack by its degree: one formula for both kinds of communication, over a table that a cost model fills
(`CostModel.rates`). It is all that schedulers see of costs.

    compute = language / (d v) + encode / v
    time = compute + max(0, transfer_s * sum s - overlap * attention / v) + waits + overhead_s

and least_s at least. `overhead_s` holds latency and pack_s; `waits` are those of `cost.py`.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeVar, overload

import numpy as np

Number = TypeVar("Number", float, np.ndarray)

RATE = np.dtype([(name, np.float64) for name in (
    "inside_s", "across_s", "overlap", "overhead_s", "encoder_pass_s", "least_s", "moved", "from_tokens",
    "free_tokens", "forward")])
"""What a pack of one degree pays: seconds a token inside a node and across nodes, what a second of attention hides
of that, seconds once, once more where it has images, and at least; what it moves of its activations to host memory
where it has more tokens than `free_tokens` (`Offload`, of all its ranks); and the share of its compute that is its
forward pass's."""


class OverlapOf(Protocol[Number]):
    """What of a RATE says how far compute hides what runs beside it."""

    overlap: Number
    overhead_s: Number
    least_s: Number
    moved: Number
    from_tokens: Number
    free_tokens: Number
    forward: Number


class RateOf(OverlapOf[Number], Protocol[Number]):
    """The fields of RATE: numbers of one record, arrays of many."""

    inside_s: Number
    across_s: Number
    encoder_pass_s: Number


Rate: TypeAlias = RateOf[float]


class Rates(RateOf[np.ndarray], Protocol):
    """A numpy.recarray of RATE: one for each degree from 0 (unused) on, or for each of many packs."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, degree: int) -> Rate: ...
    @overload
    def __getitem__(self, degree: np.ndarray) -> Rates: ...


def pairs_of(num_tokens: Any, block: float) -> Any:
    """What attention's seconds grow with: pairs of tokens, twice, where a token sees those before it, and what a
    kernel that takes keys by the block computes beside them.
    """
    return num_tokens * (num_tokens + np.minimum(num_tokens, block))


def predicted_s(
    language_s: Number,
    attention_s: Number,
    encode_s: Number,
    host_s: Number,
    num_tokens: Number,
    degree: Number,
    speed: Number,
    transfer_s: Number,
    rate: OverlapOf[Number],
) -> Number:
    """Seconds of a pack by the formula above, or of many at once.

    `encode_s` is at the encoding member's own speed, with `encoder_pass_s` where it encodes any; `transfer_s` is
    `inside_s` or `across_s` of the degree's `rate`.
    """
    seconds = held_s(language_s, attention_s, encode_s, num_tokens, degree, speed, transfer_s, rate)
    if np.any(rate.moved):
        copied_s = moved_s(host_s, num_tokens, rate)
        seconds = seconds + waits_s(language_s / (degree * speed) + encode_s, copied_s, rate.forward)
    time_s: Number = np.maximum(rate.least_s, seconds)
    return time_s


def held_s(
    language_s: Number,
    attention_s: Number,
    encode_s: Number,
    num_tokens: Number,
    degree: Number,
    speed: Number,
    transfer_s: Number,
    rate: OverlapOf[Number],
) -> Number:
    """Seconds of a pack that moves none of its activations, without `least_s`: the one place where this stands."""
    exposed_s: Number = np.maximum(0.0, transfer_s * num_tokens - rate.overlap * attention_s / speed)
    return language_s / (degree * speed) + encode_s + exposed_s + rate.overhead_s


def moved_s(host_s: Number, num_tokens: Number, rate: OverlapOf[Number]) -> Number:
    """Seconds that each rank of a pack copies to host memory, and as many back: the one place where this stands."""
    moved = rate.moved * np.maximum(0.0, 1.0 - rate.from_tokens / num_tokens) * (num_tokens > rate.free_tokens)
    copied_s: Number = moved * host_s
    return copied_s


def waits_s(compute_s: Number, copied_s: Number, forward: Number) -> Number:
    """Seconds that a pack waits for its copies out, beside the share `forward` of its compute, and back, beside the
    rest: the one place where this stands."""
    waits: Number = np.maximum(0.0, copied_s - forward * compute_s) + np.maximum(
        0.0, copied_s - (1.0 - forward) * compute_s)
    return waits
