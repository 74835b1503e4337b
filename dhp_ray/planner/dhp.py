"""The planner of dhp_ray: the schedule of its mode, or a baseline's plan where that is better.

Near the lower bound no baseline can be better by much, so the baselines are asked only where the plan is farther from it, or the batch is small. (Of a huge
batch they would take seconds.)
"""

from __future__ import annotations

from dhp_ray.planner.lockstep import dhp_micro_batch
from dhp_ray.planner.paper import dhp_paper
from dhp_ray.planner.pow2 import pow2
from dhp_ray.planner.pricing import makespan_of, times_of
from dhp_ray.planner.problem import Placement, Problem
from dhp_ray.planner.static import static
from dhp_ray.planner.step import dhp_step

NEAR, SMALL, HUGE = 1e-2, 10_000, 20_000
"""A plan of more than SMALL sequences x ranks is compared with the baselines if it is more than NEAR (a share) above the bound; one of more than HUGE
sequences is not."""


def dhp(problem: Problem) -> list[Placement]:
    """Placements in order of execution."""
    bound_s, fixed_s = problem.lower_bound_s, problem.cost.fixed_s
    plans = [dhp_micro_batch(problem)] if problem.sync == "micro_batch" else dhp_step(problem, bound_s - fixed_s)
    times = [_time_s(problem, plan) for plan in plans]
    gap = (min(times) - fixed_s) / (bound_s - fixed_s) - 1
    count = len(problem.samples)
    if gap > 1e-6 and count <= HUGE and (gap > NEAR or count * problem.cluster.num_ranks <= SMALL):
        plans += [baseline(problem) for baseline in (static, pow2, dhp_paper)]
        times += [_time_s(problem, plan) for plan in plans[len(times):]]
    return plans[times.index(min(times))]


def _time_s(problem: Problem, plan: list[Placement]) -> float:
    return makespan_of(problem, plan, times_of(problem, plan)[0])
