"""Rebalances items over ranks by moves and swaps, until the fullest rank ends in time or nothing helps.

The fullest rank gives an item to another rank, or swaps it for a smaller one, trying the emptiest rank first. Half of
the difference between their ends should move. Among all pairs of items, the pair that makes the later of both ends
least is taken (if packs have a fixed cost, only among pairs next to the wanted difference). Ranks keep their items
largest first, so that one pass over both finds it:

    rank 0  |--5--|--5--|-4-|    14          4 s between the ends: 2 s should go     |--3--|--5--|-4-|    12
    rank 1  |-4-|-3-|-3-|        10          over, which 5 for 3 does                |-4-|--5--|-3-|      12

Exchanges between the fullest rank and others: Finn and Horowitz 1979. O(ranks + items of two ranks) for each, as long
as the emptiest ranks can take something.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.primitives.compiled import inner
from dhp_ray.planner.primitives.sorting import ascending, insertion_sort

EXCHANGES = 8
"""The most exchanges for each rank. (Images of benchmarks/encoder.py need up to 2.)"""

BETTER = 1e-9
"""The share by which an exchange must shorten the longer of two ranks."""


class Loads(NamedTuple):
    """Items and their costs: `seconds` of each on a rank of speed 1, and `tokens`. A pack holds `capacity` tokens and
    costs `pack_s`.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    speeds: np.ndarray
    capacity: int
    pack_s: float


@inner
def rebalance(
    loads: Loads, rank_of: np.ndarray, ends_s: np.ndarray, held: np.ndarray, target_s: float, partners: int
) -> None:
    """Exchange items between the fullest rank and one of the `partners` emptiest ranks, until all end by the target or
    no exchange helps.

    `rank_of`: the rank of each item, -1 for one that is not on any; `ends_s` and `held`: when each rank ends, and its
    tokens. All three are changed.
    """
    seconds, num_ranks = loads.seconds, len(ends_s)
    largest, smaller = np.full(num_ranks, -1), np.full(len(seconds), -1)  # a rank's items, as a chain
    for item in range(len(seconds) - 1, -1, -1):
        if rank_of[item] >= 0:
            _add(largest, smaller, seconds, rank_of[item], item)
    by_end = ascending(ends_s)
    for _ in range(EXCHANGES * num_ranks):
        fullest, given = by_end[num_ranks - 1], -1
        if ends_s[fullest] <= target_s:
            return
        for place in range(min(partners, num_ranks - 1)):
            other = by_end[place]
            given, taken = _best_exchange(loads, largest, smaller, fullest, other, ends_s, held)
            if given >= 0:
                _give(loads, largest, smaller, given, fullest, other, rank_of, ends_s, held)
                if taken >= 0:
                    _give(loads, largest, smaller, taken, other, fullest, rank_of, ends_s, held)
                break
        if given < 0:
            return
        insertion_sort(by_end, 0, num_ranks, ends_s)


@inner
def _best_exchange(
    loads: Loads, largest: np.ndarray, smaller: np.ndarray, fullest: int, other: int, ends_s: np.ndarray,
    held: np.ndarray,
) -> tuple[int, int]:
    """(item that the fullest rank gives, item that it takes for it) such that the later of both ends is least; -1 for
    none.
    """
    seconds, tokens = loads.seconds, loads.tokens
    speed, other_speed = loads.speeds[fullest], loads.speeds[other]
    best_s, given, taken = ends_s[fullest] * (1.0 - BETTER), -1, -1
    wanted_s = (ends_s[fullest] - ends_s[other]) / (1.0 / speed + 1.0 / other_speed)
    above, below = -1, largest[other]  # its two items next to the length that should come back for the given one
    item = largest[fullest]
    while item >= 0:
        while below >= 0 and seconds[below] > seconds[item] - wanted_s:
            above, below = below, smaller[below]
        for back in (above, below):
            if back < 0 and below >= 0:
                continue
            over_s, moved = seconds[item], tokens[item]
            if back >= 0:
                over_s, moved = over_s - seconds[back], moved - tokens[back]
            end_s = max(
                ends_s[fullest] - over_s / speed + packs_s(loads, held[fullest], -moved),
                ends_s[other] + over_s / other_speed + packs_s(loads, held[other], moved),
            )
            if end_s < best_s:
                best_s, given, taken = end_s, item, back
        item = smaller[item]
    return given, taken


@inner
def packs_s(loads: Loads, held: int, more: int) -> float:
    """Additional seconds of a rank's packs after adding `more` tokens."""
    capacity = loads.capacity
    packs = (held + more + capacity - 1) // capacity - (held + capacity - 1) // capacity
    return packs * loads.pack_s


@inner
def _give(
    loads: Loads, largest: np.ndarray, smaller: np.ndarray, item: int, source: int, target: int, rank_of: np.ndarray,
    ends_s: np.ndarray, held: np.ndarray,
) -> None:
    if largest[source] == item:
        largest[source] = smaller[item]
    else:
        before = largest[source]
        while smaller[before] != item:
            before = smaller[before]
        smaller[before] = smaller[item]
    _add(largest, smaller, loads.seconds, target, item)
    rank_of[item] = target
    for rank, sign in ((source, -1), (target, 1)):
        moved = sign * loads.tokens[item]
        ends_s[rank] += sign * loads.seconds[item] / loads.speeds[rank] + packs_s(loads, held[rank], moved)
        held[rank] += moved


@inner
def _add(largest: np.ndarray, smaller: np.ndarray, seconds: np.ndarray, rank: int, item: int) -> None:
    """Insert an item into the chain of a rank, by its seconds."""
    before, after = -1, largest[rank]
    while after >= 0 and seconds[after] > seconds[item]:
        before, after = after, smaller[after]
    smaller[item] = after
    if before < 0:
        largest[rank] = item
    else:
        smaller[before] = item
