"""The best static layout for this very batch: every degree that holds the longest sequence is tried, one for all groups."""

from __future__ import annotations

from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.static import uniform


def static_best(problem: Problem) -> Schedule:
    """Of the degrees that leave equally many groups, the largest is tried: O(sqrt N) schedules."""
    num_ranks, least = problem.cluster.num_ranks, int(problem.items.minimum_degree.max())
    degrees = sorted({num_ranks // groups for groups in range(1, num_ranks // least + 1)} | {least})
    return min((uniform(problem, degree) for degree in degrees), key=lambda schedule: time_of(problem, schedule))
