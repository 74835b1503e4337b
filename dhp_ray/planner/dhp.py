"""The planner of dhp_ray: the schedule of its mode, or a baseline's plan where that is better."""

from __future__ import annotations

from dhp_ray.planner.bound import lower_bound_s
from dhp_ray.planner.paper import dhp_paper
from dhp_ray.planner.pricing import makespan_of, times_of
from dhp_ray.planner.problem import Placement, Problem
from dhp_ray.planner.step import dhp_step


def dhp(problem: Problem) -> list[Placement]:
    bound = lower_bound_s(problem)
    if problem.sync == "micro_batch":
        return dhp_paper(problem)
    plans = dhp_step(problem, bound - problem.cost.fixed_s)
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: makespan_of(problem, plan, times_of(problem, plan)[0]))
