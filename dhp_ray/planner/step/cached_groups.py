"""Process groups that can be used again: those in the pool, and those that this plan has already formed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Item, Machine, time_s
from dhp_ray.planner.primitives.compiled import inner
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import firsts_of
from dhp_ray.planner.step.candidates import ROUNDING, Candidate


class CachedGroups(NamedTuple):
    """Group i is ranks[first[i]:first[i + 1]], ascending."""

    ranks: np.ndarray
    first: np.ndarray


def cached_groups_of(problem: Problem) -> CachedGroups:
    """Groups of the pool that fit this cluster, least recently used first."""
    usable = [
        ranks for ranks in problem.pool if len(ranks) > 1 and min(ranks) >= 0 and max(ranks) < problem.cluster.num_ranks
    ]
    return CachedGroups(
        np.array([rank for ranks in usable for rank in sorted(ranks)], dtype=np.int64),
        firsts_of([len(ranks) for ranks in usable]),
    )


@inner
def best_cached_group(
    item: Item,
    lowest: int,
    highest: int,
    makespan: float,
    machine: Machine,
    free: np.ndarray,
    cached: CachedGroups,
    num_cached: int,
    gap_weight: float,
    limit: float,
    chosen: np.ndarray,
) -> Candidate:
    """Among the first `num_cached` groups with `lowest` to `highest` ranks, the one that wastes least (`candidates`),
    at most `limit`; degree 0 if there is none.
    """
    best = Candidate(limit, 0, 0.0)
    ranks, first, speeds, node = cached.ranks, cached.first, machine.speeds, machine.node
    of_degree, least_s = 0, 0.0  # seconds on this many ranks of the fastest speed, in one node
    for index in range(num_cached):
        begin, end = first[index], first[index + 1]
        degree = end - begin
        if degree < lowest or degree > highest:
            continue
        if degree != of_degree:
            of_degree, least_s = degree, time_s(item, degree, False, machine.fastest, machine.rates[degree])
        start, slowest, speed_sum, used = 0.0, np.inf, 0.0, 0.0
        for place in range(begin, end):
            rank = ranks[place]
            start, slowest = max(start, free[rank]), min(slowest, speeds[rank])
            speed_sum += speeds[rank]
            used += free[rank] * speeds[rank]
        if start + least_s > makespan * (1.0 + ROUNDING):
            continue  # most groups: too late on ranks of the fastest speed, so on slower ones too (as in `candidates`)
        crosses = node[ranks[begin]] != node[ranks[end - 1]]
        time = least_s
        if crosses or slowest != machine.fastest:
            time = time_s(item, degree, crosses, slowest, machine.rates[degree])
        cost = gap_weight * (start * speed_sum - used) + time * speed_sum - item.language_s - item.vision_s
        if start + time <= makespan and cost <= best.cost:
            best = Candidate(cost, degree, start)
            chosen[:degree] = ranks[begin:end]
    return best
