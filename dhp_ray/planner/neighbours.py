"""Renumbers ranks so that planners see the ranks of a node as neighbours, the largest node first; plans are mapped back
to the ranks' own numbers.

    node of each rank   0 1 0 1 1      the planner's rank   0 1 2 3 4
                                       the cluster's        1 3 4 0 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dhp_ray.planner.nodes import sizes_of
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule


def neighbours(nodes: Sequence[int]) -> np.ndarray | None:
    """The cluster's rank for each rank of the planner; None if the cluster's ranks are already in such an order."""
    sizes = sizes_of(nodes)
    order = sorted(range(len(nodes)), key=lambda rank: (-sizes[nodes[rank]], nodes[rank]))
    return None if order == list(range(len(nodes))) else np.array(order)


def reordered(problem: Problem, order: np.ndarray) -> Problem:
    """The same problem with rank `order[r]` as rank r."""
    cluster, place = problem.cluster, np.argsort(order)
    there = replace(
        cluster,
        speeds=tuple([cluster.speeds[rank] for rank in order]),
        nodes=tuple([cluster.nodes[rank] for rank in order]),
    )
    usable = [ranks for ranks in problem.pool if len(ranks) > 1 and min(ranks) >= 0 and max(ranks) < len(order)]
    return replace(problem, cluster=there, pool=tuple([tuple(sorted(place[list(ranks)].tolist())) for ranks in usable]))


def renamed(schedule: Schedule, order: np.ndarray) -> Schedule:
    """A schedule of the reordered ranks, mapped back to the ranks that they stand for; those of a group ascend."""
    ranks, group = (
        order[schedule.ranks],
        np.repeat(np.arange(len(schedule.first_rank) - 1), np.diff(schedule.first_rank)),
    )
    return schedule._replace(ranks=ranks[np.lexsort((ranks, group))])
