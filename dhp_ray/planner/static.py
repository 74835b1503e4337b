"""The static layout: every group has the degree of the longest sequence, whatever the others need."""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.compiled import compiled
from dhp_ray.planner.items import packed, times_at
from dhp_ray.planner.packing import best_fit_decreasing
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule, firsts_of, gathered


def static(problem: Problem) -> Schedule:
    """Groups of one degree, side by side; packs by best-fit decreasing, the slowest first, each to the group that has done it first."""
    return uniform(problem, int(problem.items.minimum_degree.max()))


def uniform(problem: Problem, degree: int) -> Schedule:
    """A schedule in which every group has `degree` ranks (ranks left over stay idle). O(K log K + packs x groups)."""
    cluster, lockstep = problem.cluster, problem.sync == "micro_batch"
    num_groups = cluster.num_ranks // degree
    packs = best_fit_decreasing(problem.items.tokens, np.full(len(problem.items), degree * cluster.tokens_per_rank))
    times = times_at(packed(problem.items, packs, cluster.tokens_per_rank), degree, problem.nominal_machine)
    order = np.argsort(-times, kind="stable")
    count = np.arange(len(order))
    if lockstep:  # slowest beside slowest
        group = count % num_groups
    else:
        pace = np.minimum.reduceat(problem.speeds, np.arange(num_groups) * degree)
        group = _earliest(times[order], pace)
    rows, first_row = gathered(packs.rows, packs.first, order)
    ranks = (group[:, None] * degree + np.arange(degree)).ravel()
    return Schedule(rows, first_row, ranks, firsts_of(np.full(len(order), degree)), count // num_groups * int(lockstep))


@compiled
def _earliest(times: np.ndarray, pace: np.ndarray) -> np.ndarray:
    """The group that has done each pack first, one after the other."""
    free, chosen = np.zeros(len(pace)), np.zeros(len(times), dtype=np.int64)
    for pack in range(len(times)):
        best = 0
        for group in range(1, len(pace)):
            if free[group] + times[pack] / pace[group] < free[best] + times[pack] / pace[best]:
                best = group
        chosen[pack] = best
        free[best] += times[pack] / pace[best]
    return chosen
