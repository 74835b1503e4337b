"""The items that schedulers place: sequences, or packs made beforehand. Compiled loops read them as records, which are
passed for free.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast, overload

import numpy as np

from dhp_ray.planner.primitives.compiled import inner
from dhp_ray.planner.rates import Number, OverlapOf, Rate, Rates, again_s, held_s, predicted_s, share_of, waits_s

Whole = TypeVar("Whole", int, np.ndarray)

DEGREES = 32
"""`fullest_s` of an item has an entry for each degree from 1 to DEGREES."""

ITEM = np.dtype(
    [(name, np.float64) for name in ("language_s", "attention_s", "vision_s", "image_s", "host_s")]
    + [("tokens", np.int64), ("minimum_degree", np.int64), ("fullest_s", np.float64, (DEGREES,))]
)
"""One item; seconds are of one nominal rank.

attention_s: a part of language_s. vision_s: all its images; image_s: the largest of them. fullest_s[d - 1]: on d ranks,
the images of the most loaded rank (`encoders`). host_s: its activations over a rank's link to host memory, one way, if
all of them were moved. minimum_degree: the fewest ranks that hold it. A pack has the sums of its sequences, their
largest `image_s`, and `fullest_s` of all their images.
"""


class ItemOf(Protocol[Number, Whole]):
    """The fields of ITEM: numbers of one record, arrays of many."""

    language_s: Number
    attention_s: Number
    vision_s: Number
    image_s: Number
    host_s: Number
    tokens: Whole
    minimum_degree: Whole
    fullest_s: np.ndarray


Item: TypeAlias = ItemOf[float, int]


class Items(ItemOf[np.ndarray, np.ndarray], Protocol):
    """A numpy.recarray of ITEM."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: np.ndarray | slice) -> Items: ...


class Machine(NamedTuple):
    """The cluster and its costs (`CostModel.rates`).

    uniform: all ranks have speed 1. slowest, fastest: the speeds of these ranks. tokens_per_rank: for packs of several
    sequences (`cheap_tokens`). most_tokens_per_rank: for a single sequence.

    Rank r is on node `node[r]`; node n has the ranks from `first[n]` to `first[n + 1]` (`neighbours`), at most
    `ranks_per_node`.
    """

    speeds: np.ndarray
    node: np.ndarray
    first: np.ndarray
    ranks_per_node: int
    tokens_per_rank: int
    most_tokens_per_rank: int
    uniform: bool
    slowest: float
    fastest: float
    rates: Rates


def items_of(
    tokens: np.ndarray,
    language_s: np.ndarray,
    attention_s: np.ndarray,
    vision_s: np.ndarray,
    image_s: np.ndarray,
    host_s: np.ndarray,
    fullest_s: np.ndarray,
    most_tokens_per_rank: int,
) -> Items:
    """One item for each entry of the arrays."""
    items = cast(Items, np.recarray(len(tokens), dtype=ITEM))
    items.tokens, items.language_s, items.attention_s, items.vision_s, items.image_s, items.host_s, items.fullest_s = (
        tokens,
        language_s,
        attention_s,
        vision_s,
        image_s,
        host_s,
        fullest_s,
    )
    items.minimum_degree = -(-tokens // most_tokens_per_rank)
    return items


def times_at(items: Items, degree: int, machine: Machine) -> np.ndarray:
    """Seconds of every item on `degree` nominal ranks, in one node if they fit."""
    rate = machine.rates[degree]
    transfer_s = rate.across_s if degree > machine.ranks_per_node else rate.inside_s
    if degree <= DEGREES:
        encode_s = items.fullest_s[:, degree - 1]
    else:
        encode_s = np.maximum(items.vision_s / degree, items.image_s)
    encode_s = encode_s + rate.encoder_pass_s * (items.image_s > 0)
    return predicted_s(
        items.language_s,
        items.attention_s,
        encode_s,
        items.host_s,
        items.tokens,
        degree,
        1.0,
        transfer_s,
        rate,
    )


compiled_held_s, compiled_share_of = inner(held_s), inner(share_of)
compiled_waits_s, compiled_again_s = inner(waits_s), inner(again_s)


@inner
def compiled_encoding_s(encode_s: float, num_tokens: float, rate: OverlapOf[float]) -> float:
    """`encoding_s` for compiled loops."""
    return encode_s * (1.0 + compiled_share_of(num_tokens, rate) * rate.encoded_again) if rate.again > 0.0 else encode_s


@inner
def compiled_running_s(
    language_s: float,
    attention_s: float,
    encode_s: float,
    host_s: float,
    num_tokens: float,
    degree: int,
    speed: float,
    transfer_s: float,
    rate: OverlapOf[float],
) -> float:
    """`running_s` for compiled loops."""
    seconds = compiled_held_s(language_s, attention_s, encode_s, num_tokens, degree, speed, transfer_s, rate)
    if rate.moved > 0.0:
        copied_s = host_s * rate.moved * compiled_share_of(num_tokens, rate)
        seconds += compiled_waits_s(language_s / (degree * speed) + encode_s, copied_s, rate.forward)
    if rate.again > 0.0:
        seconds += compiled_share_of(num_tokens, rate) * compiled_again_s(seconds, encode_s, rate)
    return seconds


@inner
def compiled_predicted_s(
    language_s: float,
    attention_s: float,
    encode_s: float,
    host_s: float,
    num_tokens: float,
    degree: int,
    speed: float,
    transfer_s: float,
    rate: OverlapOf[float],
) -> float:
    """`predicted_s` for compiled loops."""
    return max(rate.least_s, compiled_running_s(
        language_s, attention_s, encode_s, host_s, num_tokens, degree, speed, transfer_s, rate))


@inner
def encode_s_of(item: Item, degree: int) -> float:
    """Seconds of the images of the most loaded of `degree` nominal ranks; above DEGREES as if they were dealt out
    evenly.
    """
    if degree <= DEGREES:
        return float(item.fullest_s[degree - 1])
    return max(item.vision_s / degree, item.image_s)


@inner
def time_s(item: Item, degree: int, crosses: bool, speed: float, rate: Rate) -> float:
    """Seconds of an item on `degree` ranks, the slowest of which has `speed`."""
    encode_s = encode_s_of(item, degree)
    if item.image_s > 0.0:
        encode_s += rate.encoder_pass_s
    transfer_s = rate.across_s if crosses else rate.inside_s
    return compiled_predicted_s(
        item.language_s,
        item.attention_s,
        encode_s / speed,
        item.host_s,
        item.tokens,
        degree,
        speed,
        transfer_s,
        rate,
    )


@inner
def least_degree(item: Item, time_limit_s: float, fastest: float, node_size: int, rates: Rates, most: int) -> int:
    """The fewest ranks, if all had the fastest speed, that run an item within a time, inside a node if they fit; 0 if
    that takes more than `most`.

    O(1) unless communication dominates.
    """
    degree = max(item.minimum_degree, int(item.language_s / (time_limit_s * fastest)))
    while degree <= most:
        if time_s(item, degree, degree > node_size, fastest, rates[degree]) <= time_limit_s:
            return degree
        degree += 1
    return 0
