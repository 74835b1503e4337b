"""The best static layout for this batch alone: one pack cap, and one degree for all groups, among the degrees that
hold the longest sequence.
"""

from __future__ import annotations

from dhp_ray.planner.baselines.static import best_layout, uniform
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule


def static_best(problem: Problem) -> Schedule:
    return uniform(problem, best_layout([problem]))
