"""The last resort if a plan is not ready when the ranks are: close to `dhp`'s plans, in less time.

With `sync=step` it is the same search on the makespan with its cheapest settings: one trial for each makespan, no local
search, no preference for the pool, no baselines. It is `dhp` itself if the quick search would be far from that (small
batches, up to 1.27 times as long) or no faster (`sync=micro_batch`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dhp_ray.planner.dhp import dhp
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.primitives.packing import unpacked
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.step.cached_groups import cached_groups_of
from dhp_ray.planner.step.rank_lists import rank_lists
from dhp_ray.planner.step.search import TINY, Search, item_sets, schedule_of
from dhp_ray.planner.ways import few_ways

TOLERANCE = 0.003
"""The search ends this close to an infeasible makespan, as a share."""

NEAR = 0.02
"""A plan that is at most this far above the bound, as a share, is good enough: no packs are tried."""


def dhp_quick(problem: Problem) -> Schedule:
    """A balanced schedule in either mode. O(sequences x ranks) for a few makespans."""
    if problem.sync == "micro_batch" or len(problem.items) * problem.cluster.num_ranks <= TINY:
        return dhp(problem)
    shortest, shortest_s = None, np.inf
    for way in few_ways(problem, as_it_is=True):
        if way.searched.lower_bound_s < shortest_s:
            schedule = quick_step(replace(way.searched, pool=()), way.searched.lower_bound_s - problem.cost.fixed_s)
            if (schedule_s := time_of(problem, schedule)) < shortest_s:
                shortest, shortest_s = schedule, schedule_s
    assert shortest is not None
    return shortest


def quick_step(problem: Problem, bound_s: float) -> Schedule:
    """The shorter schedule of single sequences and, if that may help, of packs. `bound_s` excludes fixed costs."""
    machine, lists, schedules = problem.machine, rank_lists(problem.machine), list[Schedule]()
    shortest_s = np.inf
    for items, packs in item_sets(problem):
        search = Search(items, packs, machine, lists, cached_groups_of(problem), bound_s)
        if schedules and not search.below(shortest_s, TOLERANCE, search.quick):
            break
        found = search.shortest(TOLERANCE, search.quick)
        schedules.append(unpacked(schedule_of(found, items, machine), packs))
        shortest_s = found.makespan_s
        if shortest_s <= bound_s * (1 + NEAR):
            break
    return min(schedules, key=lambda schedule: time_of(problem, schedule))
