"""The planner of dhp_ray: the schedule of its mode, or a baseline's plan, packed to memory, where that is better.

Near the lower bound no baseline can be better by much, so the baselines are asked only where the plan is farther from it, or the batch is small. (Of a huge
batch they would take seconds.) Where there is a pool, the plan that makes the fewest new groups is taken of those that are hardly longer than the shortest.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.lockstep import dhp_micro_batch
from dhp_ray.planner.paper import paper_at
from dhp_ray.planner.pow2 import packed_to_memory
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.step import dhp_step

NEAR, SMALL, HUGE = 1e-2, 10_000, 20_000
"""A plan of more than SMALL sequences x ranks is compared with the baselines if it is more than NEAR (a share) above the bound; one of more than HUGE
sequences is not."""

HARDLY = 9e-3
"""What a plan may be longer, as a share, to make fewer new groups."""


def dhp(problem: Problem) -> Schedule:
    bound_s, fixed_s = problem.lower_bound_s, problem.cost.fixed_s
    schedules = [dhp_micro_batch(problem)] if problem.sync == "micro_batch" else dhp_step(problem, bound_s - fixed_s)
    times = [time_of(problem, schedule) for schedule in schedules]
    gap = (min(times) - fixed_s) / (bound_s - fixed_s) - 1
    count = len(problem.samples)
    if gap > 1e-6 and count <= HUGE and (gap > NEAR or count * problem.cluster.num_ranks <= SMALL):
        memory = problem.cluster.tokens_per_rank
        schedules += [*packed_to_memory(problem), paper_at(problem, memory, memory)]
        times += [time_of(problem, schedule) for schedule in schedules[len(times):]]
    most_s = min(times) + HARDLY * (min(times) - fixed_s) if problem.pool else min(times)
    hardly_longer = [(new_groups(problem, schedule), time_s, index) for index, (schedule, time_s) in enumerate(zip(schedules, times)) if time_s <= most_s]
    return schedules[min(hardly_longer)[2]]


def new_groups(problem: Problem, schedule: Schedule) -> int:
    """Distinct groups of two ranks and more that are not in the pool."""
    if not problem.pool:
        return 0
    ranks, first = schedule.ranks.tolist(), schedule.first_rank.tolist()
    groups = {tuple(ranks[first[group]:first[group + 1]]) for group in np.flatnonzero(np.diff(schedule.first_rank) > 1)}
    return len(groups - set(problem.pool))
