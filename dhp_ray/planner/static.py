"""The static layout: every group has the degree of the longest sequence, whatever the others need."""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.items import packed, times_at
from dhp_ray.planner.packing import best_fit_decreasing
from dhp_ray.planner.placing import earliest_blocks
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule, firsts_of, gathered


def static(problem: Problem) -> Schedule:
    """Groups of one degree, side by side; packs by best-fit decreasing, the slowest first, each to the group that has done it first."""
    return uniform(problem, int(problem.items.minimum_degree.max()))


def uniform(problem: Problem, degree: int) -> Schedule:
    """A schedule in which every group has `degree` ranks (ranks left over stay idle). O(K log K + packs x ranks)."""
    cluster, lockstep = problem.cluster, problem.sync == "micro_batch"
    num_groups = cluster.num_ranks // degree
    packs = best_fit_decreasing(problem.items.tokens, np.full(len(problem.items), degree * cluster.tokens_per_rank))
    times = times_at(packed(problem.items, packs, cluster.tokens_per_rank), degree, problem.nominal_machine)
    order = np.argsort(-times, kind="stable")
    count = np.arange(len(order))
    # in lockstep slowest beside slowest
    group = count % num_groups if lockstep else earliest_blocks(np.full(len(order), degree), times[order], problem.speeds) // degree
    rows, first_row = gathered(packs.rows, packs.first, order)
    ranks = (group[:, None] * degree + np.arange(degree)).ravel()
    return Schedule(rows, first_row, ranks, firsts_of(np.full(len(order), degree)), count // num_groups * int(lockstep))
