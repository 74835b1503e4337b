"""`dhp` in little time: the last resort where a plan is not there when the ranks are. Near `dhp`'s plans, in a
fraction of its time.

The same search on the makespan with its cheapest settings: hardly any thorough trials, no local search, no regard
for the pool. With `sync=micro_batch` a beam of one partial plan and a few makespans for each micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

from dhp_ray.planner.baselines.pow2 import packed_to_memory
from dhp_ray.planner.micro_batch.search import micro_batch_schedule
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.primitives.packing import unpacked
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.step.cached_groups import cached_groups_of
from dhp_ray.planner.step.rank_lists import rank_lists
from dhp_ray.planner.step.search import Search, item_sets, schedule_of

TOLERANCE = 0.003
"""How close to a makespan that cannot be had the search ends, as a share."""

NEAR = 0.02
"""A plan that is at most so far above the bound, as a share, is good enough: no packs are tried, and no baselines."""

TINY, FEW = 600, 100_000
"""Sequences x ranks: up to TINY with all choices of a trial, up to FEW beside baselines."""

WORK, MAKESPANS = 6_000, 24
"""Of `micro_batch.search`: sequences in all fills of one micro-batch, and makespans that are tried for it, at most."""


def dhp_quick(problem: Problem) -> Schedule:
    """A balanced schedule in either mode. O(sequences x ranks) for a few makespans."""
    return (
        quick_micro_batch(problem)
        if problem.sync == "micro_batch"
        else quick_step(problem, problem.lower_bound_s - problem.cost.fixed_s)
    )


def quick_micro_batch(problem: Problem) -> Schedule:
    """Unequal ranks go to packs by their speed, wherever they are; that is compared with packs that stay in their
    nodes."""
    schedules = [micro_batch_schedule(problem, problem.machine, WORK, MAKESPANS)]
    if not problem.machine.uniform:
        schedules.append(micro_batch_schedule(problem, problem.nominal_machine, WORK, MAKESPANS))
    return min(schedules, key=lambda schedule: time_of(problem, schedule))


def quick_step(problem: Problem, bound_s: float) -> Schedule:
    """Of single sequences and of packs, the schedule that takes least; `bound_s` excludes fixed costs."""
    machine, lists, schedules = problem.machine, rank_lists(problem.machine), list[Schedule]()
    for items, packs in item_sets(problem):
        search = Search(items, packs, machine, lists, cached_groups_of(replace(problem, pool=())), bound_s)
        found = search.shortest(TOLERANCE, search.thorough if search.size <= TINY else search.quick)
        schedules.append(unpacked(schedule_of(found, items, machine), packs))
        if found.makespan_s <= bound_s * (1 + NEAR):
            break
    else:
        if len(problem.items) * problem.cluster.num_ranks <= FEW:
            schedules += packed_to_memory(problem)
    return min(schedules, key=lambda schedule: time_of(problem, schedule))
