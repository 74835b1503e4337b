"""The static layout: every group has the degree of the longest sequence, whatever the others need."""

from __future__ import annotations

import heapq

from dhp_ray.planner.packing import best_fit_decreasing
from dhp_ray.planner.paper import pack_times
from dhp_ray.planner.problem import Placement, Problem


def static(problem: Problem) -> list[Placement]:
    """Groups of one degree, side by side; packs by best-fit decreasing, the slowest first, each to the group that is free first."""
    return uniform(problem, int(problem.minimum_degree.max()))


def uniform(problem: Problem, degree: int) -> list[Placement]:
    """A plan in which every group has `degree` ranks (ranks left over stay idle). O(K log K)."""
    num_groups = problem.cluster.num_ranks // degree
    packs = best_fit_decreasing(problem.tokens, problem.minimum_degree, problem.cluster.tokens_per_rank, degree)
    times = pack_times(problem, packs)[:, degree - 1].tolist()
    free = [(0.0, group) for group in range(num_groups)]
    placements = []
    for count, index in enumerate(sorted(range(len(packs)), key=lambda index: -times[index])):
        if problem.sync == "micro_batch":  # slowest beside slowest
            group = count % num_groups
        else:
            busy, group = heapq.heappop(free)
            heapq.heappush(free, (busy + times[index], group))
        placements.append(Placement(tuple(range(group * degree, (group + 1) * degree)), tuple(packs[index]), count // num_groups))
    return placements
