"""Seconds of a pack by its degree: the formulas of `model.py` over a table that a cost model fills (`CostModel.rates`),
one for both kinds of communication. Schedulers see nothing else of costs. Python calls them with arrays of many packs,
compiled loops with the numbers of one.

    time = max(least_s, compute + max(0, transfer_s * sum s - overlap * attention / v) + waits + again + overhead_s)
    again = share_of(sum s) * (rate.again * (compute without attention and images + overhead_s)
                               + rate.encoded_again * encode_s)
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy as np

from dhp_ray.planner.primitives.compiled import shared

Number = TypeVar("Number", float, np.ndarray)

RATE = np.dtype([(name, np.float64) for name in (
    "inside_s", "across_s", "overlap", "overhead_s", "encoder_pass_s", "least_s", "moved", "again", "encoded_again",
    "from_tokens", "free_tokens", "forward")])
"""Costs of a pack of one degree: seconds a token inside a node and across nodes; how much of that a second of attention
hides; fixed seconds, additional ones if it has images, and the least seconds. If it has more tokens than `free_tokens`
(`LayerShare`, multiplied by the degree): the activations that it moves to host memory, or the seconds that it computes
again, for each second, of images (`encoded_again`) and of all else but attention (`again`). The share of its compute
that is its forward pass.
"""

Rate: TypeAlias = np.record
Rates: TypeAlias = np.recarray
"""One for each degree from 0 (unused) on, or for each of many packs."""


def pairs_of(num_tokens: Any, block: float) -> Any:
    """The number that attention's seconds are proportional to: pairs of tokens, counted twice, in which a token attends
    to an earlier one, and the additional pairs that a kernel computes because it takes keys by the block.
    """
    return num_tokens * (num_tokens + np.minimum(num_tokens, block))


@shared
def predicted_s(
    language_s: Number,
    attention_s: Number,
    encode_s: Number,
    host_s: Number,
    num_tokens: Number,
    degree: Number,
    speed: Number,
    transfer_s: Number,
    rate: Any,
) -> Number:
    """Seconds of a pack by the formula above: `running_s`, and at least `least_s`."""
    return np.maximum(rate.least_s, running_s(
        language_s, attention_s, encode_s, host_s, num_tokens, degree, speed, transfer_s, rate))


@shared
def running_s(
    language_s: Number,
    attention_s: Number,
    encode_s: Number,
    host_s: Number,
    num_tokens: Number,
    degree: Number,
    speed: Number,
    transfer_s: Number,
    rate: Any,
) -> Number:
    """Seconds of a pack whose layers' parameters are there.

    `encode_s`: at the encoding member's own speed, including `encoder_pass_s` if it encodes any image. `rate`: the RATE
    of the degree, and `transfer_s` its `inside_s` or `across_s`.
    """
    exposed_s = np.maximum(0.0, transfer_s * num_tokens - rate.overlap * attention_s / speed)
    seconds = language_s / (degree * speed) + encode_s + exposed_s + rate.overhead_s
    if np.any(rate.moved):
        copied_s = host_s * rate.moved * share_of(num_tokens, rate)
        seconds = seconds + waits_s(language_s / (degree * speed) + encode_s, copied_s, rate.forward)
    if np.any(rate.again):
        again_s = rate.again * ((language_s - attention_s) / (degree * speed) + rate.overhead_s)
        seconds = seconds + share_of(num_tokens, rate) * (again_s + rate.encoded_again * encode_s)
    return seconds


@shared
def share_of(num_tokens: Number, rate: Any) -> Number:
    """What `moved`, `again` and `encoded_again` are multiplied by (`LayerShare.share_of`)."""
    return np.maximum(0.0, 1.0 - rate.from_tokens / num_tokens) * (num_tokens > rate.free_tokens)


@shared
def encoding_s(encode_s: Number, num_tokens: Number, rate: Any) -> Number:
    """Seconds for which a pack's busiest member encodes: `encode_s`, and what of it runs again."""
    return encode_s * (1.0 + share_of(num_tokens, rate) * rate.encoded_again)


@shared
def waits_s(compute_s: Number, copied_s: Number, forward: Number) -> Number:
    """Seconds that a pack waits for its copies out, during the share `forward` of its compute, and back, during the
    rest.
    """
    return np.maximum(0.0, copied_s - forward * compute_s) + np.maximum(
        0.0, copied_s - (1.0 - forward) * compute_s)
