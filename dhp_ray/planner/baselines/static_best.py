"""The best static layout for this very batch: one degree for all groups, of those that hold the longest sequence,
and one pack cap."""

from __future__ import annotations

from dhp_ray.planner.baselines.static import best_layout, uniform
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule


def static_best(problem: Problem) -> Schedule:
    return uniform(problem, best_layout([problem]))
