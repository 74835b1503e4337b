"""`dhp` in little time: the last resort where a plan is not there when the ranks are. Near `dhp`'s plans, in a
fraction of its time.

The same search on the makespan with its cheapest settings: hardly any thorough trials, no local search, no regard
for the pool. With `sync=micro_batch` a beam of one partial plan and a few makespans for each micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dhp_ray.planner.baselines.pow2 import packed_to_memory
from dhp_ray.planner.items import Items, Machine
from dhp_ray.planner.micro_batch.search import micro_batch_schedule
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.primitives.packing import unpacked
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.step.cached_groups import CachedGroups
from dhp_ray.planner.step.rank_lists import RankLists, rank_lists
from dhp_ray.planner.step.search import WIDEN, Search, item_sets, schedule_of
from dhp_ray.planner.step.trial import Found

TOLERANCE = 0.02
"""How close to a makespan that cannot be had the search ends, as a share."""

NEAR, FAR = 0.02, 0.05
"""A plan that is at most NEAR above the bound, as a share, is good enough; baselines are asked beside one that is
more than FAR above it."""

TINY, FEW = 600, 100_000
"""Sequences x ranks: up to TINY with all choices of a trial, up to FEW beside baselines."""

WORK, MAKESPANS = 6_000, 16
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
    schedules = [micro_batch_schedule(problem, WORK, MAKESPANS)]
    if not problem.machine.uniform:
        schedules.append(
            micro_batch_schedule(replace(problem, cluster=replace(problem.cluster, speeds=())), WORK, MAKESPANS)
        )
    return min(schedules, key=lambda schedule: time_of(problem, schedule))


def quick_step(problem: Problem, bound_s: float) -> Schedule:
    """Of single sequences and of packs, the schedule that takes least; `bound_s` excludes fixed costs."""
    best, best_s, fixed_s, machine = None, np.inf, problem.cost.fixed_s, problem.machine
    lists = rank_lists(machine)
    for items, packs in item_sets(problem):
        if best_s - fixed_s <= bound_s * (1 + NEAR):
            break
        found = shortest(items, machine, lists, bound_s, best_s - fixed_s)
        if found is None:
            continue
        schedule = unpacked(schedule_of(found, items, machine), packs)
        seconds = time_of(problem, schedule)
        if seconds < best_s:
            best, best_s = schedule, seconds
    assert best is not None  # some makespan is long enough
    if best_s - fixed_s > bound_s * (1 + FAR) and len(problem.items) * problem.cluster.num_ranks <= FEW:
        return min(best, *packed_to_memory(problem), key=lambda schedule: time_of(problem, schedule))
    return best


def shortest(items: Items, machine: Machine, lists: RankLists, bound_s: float, limit_s: float) -> Found | None:
    """The shortest makespan that quick trials find, below `limit_s`; None if they find none."""
    none = CachedGroups(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    search, failed_s = Search(items, machine, lists, none), bound_s
    effort = search.thorough if search.size <= TINY else search.quick
    for makespan_s in (bound_s * (1 + share) for share in WIDEN):
        if makespan_s >= limit_s:
            return None
        found = search.trial(makespan_s, effort)
        if found:
            return search.bisect(found, failed_s, TOLERANCE * bound_s, effort)
        failed_s = makespan_s
    return None
