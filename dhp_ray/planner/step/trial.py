"""One trial of `sync=step`: can every item find room under a makespan?

    1. skeleton   items that take longer than the makespan on one rank, largest first, on the windows that waste least
    2. fill       the others into the holes and tails, best fit
    3. mop up     what fits in no bin goes on several ranks, after everything else
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Items, Machine
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.step.cached_groups import Sets
from dhp_ray.planner.step.gaps import busy_of, fill
from dhp_ray.planner.step.partial_schedule import Skeleton, place_skeleton
from dhp_ray.planner.step.rank_lists import RankLists


class Choices(NamedTuple):
    """Ways to try, one a row: what a gap costs (`windows`), and the row of `orders` (items, largest first or nearly so)."""

    gap_weight: np.ndarray
    order: np.ndarray
    orders: np.ndarray


class Effort(NamedTuple):
    """How hard a trial tries: choices, and items that it mops up, at most."""

    choices: int
    leftover: int


class Found(NamedTuple):
    """Room for every item: in the skeleton, in a bin (`rest` largest first, and `bins`), or in `last`, after them. `choice` is -1 if there is none."""

    choice: int
    makespan_s: float
    skeleton: Skeleton
    rest: np.ndarray
    bins: np.ndarray
    last: Skeleton


@compiled
def try_makespan(items: Items, single_s: np.ndarray, makespan: float, machine: Machine, lists: RankLists, pool: Sets, reuse_s: float, choices: Choices,
                 begin: int, effort: Effort) -> Found:
    """The first of `effort.choices` choices, from `begin` on, that finds room for every item.

    `single_s`: each item's time on one rank, infinite where it does not fit.
    """
    idle, none = np.zeros(len(machine.speeds)), np.zeros(0, dtype=np.int64)
    no_pool = Sets(none, np.zeros(1, dtype=np.int64))
    skeleton = place_skeleton(items, none, 0.0, makespan, machine, lists, idle, no_pool, 1.0, 0.0)
    last = skeleton
    for step in range(effort.choices):
        choice = (begin + step) % len(choices.gap_weight)
        order = choices.orders[choices.order[choice]]
        skeleton = place_skeleton(items, order, makespan, makespan, machine, lists, idle, pool, choices.gap_weight[choice], reuse_s)
        if not skeleton.placed:
            continue
        rest = _kept(order, single_s[order], -np.inf, makespan)
        bins = fill(items, rest, skeleton, makespan, machine)
        left = _kept(rest, bins, -1.0, -1.0)
        if len(left) <= effort.leftover:
            busy = busy_of(items, rest, bins, skeleton, machine)
            last = place_skeleton(items, left, 0.0, makespan, machine, lists, busy, no_pool, 1.0, 0.0)
            if last.placed:
                return Found(choice, makespan, skeleton, _kept(rest, bins, 0.0, np.inf), _kept(bins, bins, 0.0, np.inf), last)
    return Found(-1, makespan, skeleton, none, none, last)


@inner
def _kept(numbers: np.ndarray, values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Those whose value lies between two (a mask would take seconds to compile)."""
    kept, count = np.zeros(len(numbers), dtype=np.int64), 0
    for index in range(len(numbers)):
        if low <= values[index] <= high:
            kept[count] = numbers[index]
            count += 1
    return kept[:count]
