"""The best static layout for this very batch: every degree that holds the longest sequence is tried, one for all groups."""

from __future__ import annotations

from dhp_ray.planner.pricing import makespan_of, times_of
from dhp_ray.planner.problem import Placement, Problem
from dhp_ray.planner.static import uniform


def static_best(problem: Problem) -> list[Placement]:
    """Of the degrees that leave equally many groups, the largest is tried: O(sqrt N) plans."""
    num_ranks, least = problem.cluster.num_ranks, int(problem.minimum_degree.max())
    degrees = sorted({num_ranks // groups for groups in range(1, num_ranks // least + 1)} | {least})
    plans = [uniform(problem, degree) for degree in degrees]
    return min(plans, key=lambda plan: makespan_of(problem, plan, times_of(problem, plan)[0]))
