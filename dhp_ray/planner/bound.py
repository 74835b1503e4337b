"""A lower bound on the time of every plan of a batch.

Fix a makespan T. A sequence in a pack of degree d makes the pack last at least its own time alone, t(d); so it runs
at a degree with t(d) <= T, and takes at least the least area a(T) over those degrees, where area is rank-seconds
weighted by speed. All areas must fit under T:

    sum of a_i(T) <= T * sum of speeds     and     t_i(d) <= T for some d, for every i

Both hold from some T on, and that T is the bound. The area of a sequence at degree d is its compute, plus its
communication on the d slowest ranks, plus its share of what a pack pays once (latency, pack_s): a pack of degree d
holds at most d * tokens_per_rank tokens, so each token carries 1 / that many. Members of a group are held to the
speed of its slowest, so with unequal speeds compute takes at least the area of d neighbours in speed. Where
attention hides communication, a pack may hide more than its sequences do alone; the area then keeps compute only
(times alone still hold: what the other sequences of a pack hide they also compute).

Where images may be encoded apart from the packs, a sequence's images take at least their time on all ranks together,
and its largest one, where it cannot be cut, that on the fastest, before and after its own time in a pack.

With `sync=micro_batch` the same holds for the sum over micro-batches (each is at most T long), with fixed_s for as
many micro-batches as the tokens need.

For each T, a sequence's least degree d(T) is a short scan and a(T) relaxes to the least charge per token over all
degrees from d(T) on, which does not depend
on the sequence: O(sequences + ranks) memory, some 40 trials of O(sequences).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeAlias, cast

import numpy as np

from dhp_ray.planner.cost import Number
from dhp_ray.planner.items import Item, Items, compiled_predicted_s
from dhp_ray.planner.primitives.bisection import compiled_halve
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.problem import Problem

LIMIT = np.dtype(
    [
        (name, np.float64)
        for name in ("speed", "encode_speed", "transfer_s", "overlap", "overhead_s", "charge_s", "stretch")
    ]
)
"""What d ranks can do at best: `speed` is the d-th fastest one, `encode_speed` the sum of the d fastest (of all, where
images may be encoded apart).

On d ranks or more, `charge_s` is the least area in seconds that a token pays beyond its compute, and `stretch` the
least area over compute: 1 but for unequal speeds, where a group's members are held to the speed of its slowest.
"""


class LimitOf(Protocol[Number]):
    """The fields of LIMIT: numbers of one record, arrays of many."""

    speed: Number
    encode_speed: Number
    transfer_s: Number
    overlap: Number
    overhead_s: Number
    charge_s: Number
    stretch: Number


Limit: TypeAlias = LimitOf[float]


class Limits(LimitOf[np.ndarray], Protocol):
    """A numpy.recarray of LIMIT, one for each number of ranks from 0 (unused) to N."""

    def __len__(self) -> int: ...
    def __getitem__(self, num_ranks: int) -> Limit: ...


STRETCHED = 64
"""Ranks of the largest set that is looked at."""


def lower_bound_s(problem: Problem) -> float:
    """Seconds that no plan of this batch can beat, fixed costs included."""
    micro_batches = 1
    if problem.sync == "micro_batch":
        micro_batches = -(-int(problem.items.tokens.sum()) // problem.cluster.max_tokens)
    items = problem.items
    if problem.encoder != "group" and problem.cost.image_piece_patches:  # several ranks may encode one image
        items = items.copy()  # type: ignore[attr-defined]
        items.image_s = 0.0
    return (
        float(_bound(items, limits_of(problem), float(problem.speeds.sum())))
        + problem.cost.fixed_s * micro_batches
    )


def bounded(problem: Problem) -> Problem:
    """The problem with its lower bound."""
    return replace(problem, lower_bound_s=lower_bound_s(problem))


def limits_of(problem: Problem) -> Limits:
    cluster, rates = problem.cluster, problem.machine.rates
    fastest = np.sort(problem.speeds)[::-1]
    degrees = np.arange(cluster.num_ranks + 1)
    limits = cast(Limits, np.recarray(len(degrees), dtype=LIMIT))
    limits.speed = fastest[np.maximum(degrees, 1) - 1]
    limits.encode_speed = np.concatenate([[1.0], np.cumsum(fastest)])
    if problem.encoder != "group":
        limits.encode_speed[1:] = fastest.sum()
    limits.transfer_s = np.where(
        degrees > cluster.ranks_per_node, rates.across_s, np.minimum(rates.inside_s, rates.across_s)
    )
    limits.overlap, limits.overhead_s = rates.overlap, rates.overhead_s
    slowest_sum = np.concatenate([[0.0], np.cumsum(fastest[::-1])])
    charge = (0.0 if rates.overlap.any() else 1.0) * limits.transfer_s * slowest_sum
    charge += rates.overhead_s * slowest_sum / (cluster.tokens_per_rank * np.maximum(degrees, 1))
    limits.charge_s = np.concatenate([[0.0], np.minimum.accumulate(charge[:0:-1])[::-1]])
    limits.stretch = np.ones(len(degrees)) if fastest[0] == fastest[-1] else _stretch(fastest)
    return limits


@compiled
def _stretch(fastest: np.ndarray) -> np.ndarray:
    """For d ranks or more: the least of (sum of speeds) / (d * slowest speed) over all sets; the best sets are
    neighbours by speed.

    It does not fall with d: without its fastest, a set of d + 1 has a lower one. So beyond STRETCHED ranks that of
    STRETCHED holds as a bound. O(N STRETCHED).
    """
    num_ranks = len(fastest)
    stretch = np.ones(num_ranks + 1)
    for degree in range(1, num_ranks + 1):
        if degree > STRETCHED:
            stretch[degree] = stretch[STRETCHED]
            continue
        best, total = np.inf, 0.0
        for last in range(num_ranks):
            total += fastest[last]
            if last >= degree:
                total -= fastest[last - degree]
            if last >= degree - 1:
                best = min(best, total / (degree * fastest[last]))
        stretch[degree] = best
    return np.maximum(stretch * (1 - 1e-12), 1.0)


@inner
def _least_time(item: Item, degree: int, limit: Limit, fastest: float) -> float:
    encode_s = max(item.vision_s / limit.encode_speed, item.image_s / fastest)
    return compiled_predicted_s(
        item.language_s,
        item.attention_s,
        encode_s,
        item.tokens,
        degree,
        limit.speed,
        limit.transfer_s,
        limit.overlap,
        limit.overhead_s,
    )


@inner
def _least_area(item: Item, limit: Limit) -> float:
    """On so many ranks or more. Images go to the members as they please, so their area is not stretched."""
    return item.language_s * limit.stretch + item.vision_s + item.tokens * limit.charge_s


@inner
def _shortest(item: Item, floor_s: float, limits: Limits) -> float:
    """Least time of an item over all degrees, or any time at or below `floor_s`."""
    best = np.inf
    for degree in range(item.minimum_degree, len(limits)):
        best = min(best, _least_time(item, degree, limits[degree], limits[1].speed))
        if best <= floor_s:
            break
    return best


@inner
def _fits(items: Items, rows: np.ndarray, area: float, limits: Limits, makespan: float, total_speed: float) -> bool:
    """Whether the areas of `rows` on the degrees that meet the makespan fit beside `area`."""
    fastest = limits[1].speed
    for row in rows:
        item = items[row]
        degree = max(item.minimum_degree, int(item.language_s / (makespan * fastest)))
        while _least_time(item, degree, limits[degree], fastest) > makespan * (1 + 1e-12):
            degree += 1
            if degree == len(limits):
                return False
        area += _least_area(item, limits[degree])
    return area <= makespan * total_speed


@compiled
def _bound(items: Items, limits: Limits, total_speed: float) -> float:
    low, fastest = 0.0, limits[1].speed
    for row in range(len(items)):
        low += _least_area(items[row], limits[items[row].minimum_degree]) / total_speed
    for row in range(len(items)):
        low = max(low, _shortest(items[row], low, limits))
    rows, count, area = np.zeros(len(items), dtype=np.int64), 0, 0.0
    for row in range(len(items)):
        degree = items[row].minimum_degree
        if _least_time(items[row], degree, limits[degree], fastest) > low:
            rows[count] = row
            count += 1
        else:  # meets every makespan that is left as it is
            area += _least_area(items[row], limits[degree])
    rows = rows[:count]
    if _fits(items, rows, area, limits, low, total_speed):
        return low
    span = np.array([low, low, low])
    while not _fits(items, rows, area, limits, span[1], total_speed):
        span[0], span[1] = span[1], span[1] * 1.2
    while compiled_halve(span, 1e-6):
        span[int(_fits(items, rows, area, limits, span[2], total_speed))] = span[2]
    return span[0]
