"""Static layouts: every group has the same degree, whatever its sequences need.

static         the degree that the longest sequence needs; the pack cap that is best for the batch
static_best    the degree and the pack cap that are best for the batch
best_layout    the degree and the pack cap that are best for a whole data set: one layout for all of its batches,
               as in static systems
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.baselines.pack_cap import best_cap, capacities
from dhp_ray.planner.primitives.best_fit import best_fit_decreasing
from dhp_ray.planner.primitives.list_schedule import on_earliest_blocks
from dhp_ray.planner.problem import Problem, packed, times_at
from dhp_ray.planner.schedule import Schedule, firsts_of, gathered

MOST = 16
"""The most degrees that are tried for one layout, in addition to powers of two."""


class Layout(NamedTuple):
    """The number of ranks of every group, and the most tokens of a pack that each of these ranks takes."""

    degree: int
    pack_cap: int


def static(problem: Problem) -> Schedule:
    """Adjacent groups of one degree. Packs come from best-fit decreasing and are placed slowest first, each on the
    group that finishes it first.
    """
    return uniform(problem, best_layout([problem], [least_degree_of([problem])]))


def best_layout(problems: Sequence[Problem], degrees: Sequence[int] = ()) -> Layout:
    """The layout with the least sum of makespans over some batches on equal clusters, with one of these degrees, or
    of `degrees_for`.
    """
    tried = degrees or degrees_for(problems)
    (_, cap), degree = min((best_cap(problems, partial(_uniform_at, degree)), degree) for degree in tried)
    return Layout(degree, cap)


def degrees_for(problems: Sequence[Problem]) -> list[int]:
    """The degrees that are tried for one static layout: the least that holds the longest sequence; powers of two; and
    up to MOST of the degrees that are the largest for some number of groups.
    """
    num_ranks, least = problems[0].cluster.num_ranks, least_degree_of(problems)
    largest = sorted({num_ranks // groups for groups in range(1, num_ranks // least + 1)})
    spread = {largest[round(place)] for place in np.linspace(0, len(largest) - 1, min(MOST, len(largest)))}
    powers = {2**power for power in range(num_ranks.bit_length()) if least <= 2**power <= num_ranks}
    return sorted({least} | spread | powers)


def least_degree_of(problems: Sequence[Problem]) -> int:
    """The fewest ranks that hold the longest sequence of some batches."""
    return max(int(problem.items.minimum_degree.max()) for problem in problems)


def _uniform_at(degree: int, problem: Problem, pack_cap: int) -> Schedule:
    return uniform(problem, Layout(degree, pack_cap))


def uniform(problem: Problem, layout: Layout) -> Schedule:
    """The schedule of a layout; ranks that are left over stay idle. O(K log K + packs x ranks)."""
    cluster, by_micro_batch, degree = problem.cluster, problem.sync == "micro_batch", layout.degree
    num_groups = cluster.num_ranks // degree
    packs = best_fit_decreasing(problem.items.tokens, capacities(problem.items.tokens, degree, layout.pack_cap))
    times = times_at(packed(problem, packs), degree, problem.nominal_machine)
    order = np.argsort(-times, kind="stable")
    count = np.arange(len(order))
    # packs are sorted by time, so those of a micro-batch take about the same time
    group = (
        count % num_groups
        if by_micro_batch
        else on_earliest_blocks(np.full(len(order), degree), times[order], problem.speeds) // degree
    )
    rows, first_row = gathered(packs.rows, packs.first, order)
    ranks = (group[:, None] * degree + np.arange(degree)).ravel()
    return Schedule(
        rows, first_row, ranks, firsts_of(np.full(len(order), degree)), count // num_groups * int(by_micro_batch)
    )


def static_best(problem: Problem) -> Schedule:
    """The best static layout for this batch alone, among the degrees that hold its longest sequence."""
    return uniform(problem, best_layout([problem]))
