"""The planner of dhp_ray: the schedule of its mode, or where the batch is small the plan of a baseline that is better.

Baselines pack to memory here; of a huge batch they would take seconds, and hardly ever be better.
"""

from __future__ import annotations

from dhp_ray.planner.baselines.paper import paper_at
from dhp_ray.planner.baselines.pow2 import packed_to_memory
from dhp_ray.planner.micro_batch.search import dhp_micro_batch
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.step.search import dhp_step

SMALL = 10_000
"""Sequences x ranks up to which plans are compared with the baselines'."""


def dhp(problem: Problem) -> Schedule:
    schedules = [dhp_micro_batch(problem)] if problem.sync == "micro_batch" else dhp_step(problem)
    if len(problem.samples) * problem.cluster.num_ranks <= SMALL:
        memory = problem.cluster.tokens_per_rank
        schedules += [*packed_to_memory(problem), paper_at(problem, memory, memory)]
    return min(schedules, key=lambda schedule: time_of(problem, schedule))
