"""Seconds of a pack by its degree: one formula for both kinds of communication, over a table that a cost model fills
(`CostModel.rates`). It is all that schedulers see of costs.

    time = language / (d v) + encode / v + max(0, transfer_s * sum s - overlap * attention / v) + overhead_s

and least_s at least. `overhead_s` holds latency and pack_s.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeVar, overload

import numpy as np

Number = TypeVar("Number", float, np.ndarray)

RATE = np.dtype([(name, np.float64)
                 for name in ("inside_s", "across_s", "overlap", "overhead_s", "encoder_pass_s", "least_s")])
"""What a pack of one degree pays: seconds a token inside a node and across nodes, what a second of attention hides
of that, seconds once, once more where it has images, and at least."""


class RateOf(Protocol[Number]):
    """The fields of RATE: numbers of one record, arrays of many."""

    inside_s: Number
    across_s: Number
    overlap: Number
    overhead_s: Number
    encoder_pass_s: Number
    least_s: Number


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
    num_tokens: Number,
    degree: Number,
    speed: Number,
    transfer_s: Number,
    overlap: Number,
    overhead_s: Number,
    least_s: Number,
) -> Number:
    """Seconds of a pack by the formula above, or of many at once: the one place where it stands.

    `encode_s` is at the encoding member's own speed; `transfer_s` is `inside_s` or `across_s` of the degree's RATE.
    """
    exposed_s: Number = np.maximum(0.0, transfer_s * num_tokens - overlap * attention_s / speed)
    time_s: Number = np.maximum(least_s, language_s / (degree * speed) + encode_s + exposed_s + overhead_s)
    return time_s
