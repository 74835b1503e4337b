"""A lower bound on the time of every plan of a batch.

Fix a makespan T. A sequence in a pack of degree d makes the pack last at least its own time alone, t(d); so it runs at a degree with t(d) <= T, and takes
at least the least area a(T) over those degrees, where area is rank-seconds weighted by speed. All areas must fit under T:

    sum of a_i(T) <= T * sum of speeds     and     t_i(d) <= T for some d, for every i

Both hold from some T on, and that T is the bound. The area of a sequence at degree d is its compute, plus its communication on the d slowest ranks, plus its
share of what a pack pays once (latency, pack_s): a pack of degree d holds at most d * tokens_per_rank tokens, so each token carries 1 / that many. Members of
a group are held to the pace of its slowest, so with unequal speeds compute takes at least the area of d neighbours in speed. Where
attention hides communication, a pack may hide more than its sequences do alone; the area then keeps compute only (times alone still hold: what the other
sequences of a pack hide they also compute).

With `sync=micro_batch` the same holds for the sum over micro-batches (each is at most T long), with fixed_s for as many micro-batches as the tokens need.

For each T, a sequence's least degree d(T) is a short scan and a(T) relaxes to the least charge per token over all degrees from d(T) on, which does not depend
on the sequence: O(sequences + ranks) memory, some 40 trials of O(sequences).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.compiled import compiled, inner
from dhp_ray.planner.items import Items, items_of
from dhp_ray.planner.problem import Problem


class Limits(NamedTuple):
    """What d ranks can do at best, for d = 0 (unused) to N: `pace` is the d-th fastest speed, `encode_pace` the sum of the d fastest.

    On d ranks or more, `charge_s` is the least area in seconds that a token pays beyond its compute, and `stretch` the least area over compute: 1 but for
    unequal speeds, where a group's members are held to the pace of its slowest.
    """

    pace: np.ndarray
    encode_pace: np.ndarray
    transfer_s: np.ndarray
    hidden: np.ndarray
    once_s: np.ndarray
    charge_s: np.ndarray
    stretch: np.ndarray


def lower_bound_s(problem: Problem) -> float:
    """Seconds that no plan of this batch can beat, fixed costs included."""
    micro_batches = 1
    if problem.sync == "micro_batch":
        micro_batches = -(-int(problem.tokens.sum()) // problem.cluster.max_tokens)
    makespan = _bound(items_of(problem), limits_of(problem), float(sum(problem.cluster.speeds)))
    return float(makespan) + problem.cost.fixed_s * micro_batches


def limits_of(problem: Problem) -> Limits:
    cluster, tables = problem.cluster, problem.tables
    fastest = np.sort(np.array(cluster.speeds))[::-1]
    degrees = np.arange(cluster.num_ranks + 1)
    pace = fastest[np.maximum(degrees, 1) - 1]
    slowest_sum = np.concatenate([[0.0], np.cumsum(fastest[::-1])])
    transfer = np.where(degrees > cluster.ranks_per_node, tables.transfer_s[1], tables.transfer_s.min(axis=0))
    once = tables.latency_s + tables.pack_s
    charge = (0.0 if tables.hidden.any() else 1.0) * transfer * slowest_sum + once * slowest_sum / (cluster.tokens_per_rank * np.maximum(degrees, 1))
    charge = np.minimum.accumulate(charge[:0:-1])[::-1]
    stretch = np.ones(len(degrees)) if fastest[0] == fastest[-1] else _stretch(fastest)
    return Limits(pace, np.concatenate([[1.0], np.cumsum(fastest)]), transfer, tables.hidden, once, np.concatenate([[0.0], charge]), stretch)


@compiled
def _stretch(fastest: np.ndarray) -> np.ndarray:
    """For d ranks or more: the least of (sum of speeds) / (d * slowest speed) over all sets; the best sets are neighbours by speed.

    O(N^2) time, O(N) memory.
    """
    num_ranks = len(fastest)
    stretch = np.ones(num_ranks + 1)
    for degree in range(num_ranks, 0, -1):
        best, total = np.inf, 0.0
        for last in range(num_ranks):
            total += fastest[last]
            if last >= degree:
                total -= fastest[last - degree]
            if last >= degree - 1:
                best = min(best, total / (degree * fastest[last]))
        stretch[degree] = best if degree == num_ranks else min(best, stretch[degree + 1])
    return np.maximum(stretch * (1 - 1e-12), 1.0)


@inner
def _least_time(items: Items, item: int, degree: int, limits: Limits) -> float:
    pace = limits.pace[degree]
    exposed = limits.transfer_s[degree] * items.tokens[item] - limits.hidden[degree] * items.attention_s[item] / pace
    encode = max(items.vision_s[item] / limits.encode_pace[degree], items.image_s[item] / limits.pace[1])
    return items.language_s[item] / degree / pace + encode + max(0.0, exposed) + limits.once_s[degree]


@inner
def _least_area(items: Items, item: int, degree: int, limits: Limits) -> float:
    """On `degree` ranks or more. Images go to the members as they please, so their area is not stretched."""
    return items.language_s[item] * limits.stretch[degree] + items.vision_s[item] + items.tokens[item] * limits.charge_s[degree]


@inner
def _shortest(items: Items, item: int, floor_s: float, limits: Limits) -> float:
    """Least time of an item over all degrees, or any time at or below `floor_s`."""
    best = np.inf
    for degree in range(items.minimum_degree[item], len(limits.pace)):
        best = min(best, _least_time(items, item, degree, limits))
        if best <= floor_s:
            break
    return best


@inner
def _fits(items: Items, rows: np.ndarray, area: float, limits: Limits, makespan: float, total_speed: float) -> bool:
    """Whether the areas of `rows` on the degrees that meet the makespan fit beside `area`."""
    for item in rows:
        degree = max(items.minimum_degree[item], int(items.language_s[item] / (makespan * limits.pace[1])))
        while _least_time(items, item, degree, limits) > makespan * (1 + 1e-12):
            degree += 1
            if degree == len(limits.pace):
                return False
        area += _least_area(items, item, degree, limits)
    return area <= makespan * total_speed


@compiled
def _bound(items: Items, limits: Limits, total_speed: float) -> float:
    low, high = 0.0, 0.0
    for item in range(len(items.tokens)):
        low += _least_area(items, item, items.minimum_degree[item], limits) / total_speed
    for item in range(len(items.tokens)):
        low = max(low, _shortest(items, item, low, limits))
    rows, count, area = np.zeros(len(items.tokens), dtype=np.int64), 0, 0.0
    for item in range(len(items.tokens)):
        degree = items.minimum_degree[item]
        if _least_time(items, item, degree, limits) > low:
            rows[count] = item
            count += 1
        else:  # meets every makespan that is left as it is
            area += _least_area(items, item, degree, limits)
    rows = rows[:count]
    if _fits(items, rows, area, limits, low, total_speed):
        return low
    high = low
    while not _fits(items, rows, area, limits, high, total_speed):
        low, high = high, high * 1.2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if _fits(items, rows, area, limits, middle, total_speed):
            high = middle
        else:
            low = middle
    return low
