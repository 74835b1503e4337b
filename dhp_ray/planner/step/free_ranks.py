"""When each rank becomes free in a partial schedule, and the ranks in that order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Machine
from dhp_ray.planner.primitives.compiled import inner
from dhp_ray.planner.primitives.sorting import insertion_sort
from dhp_ray.planner.step.rank_lists import RankLists


class FreeRanks(NamedTuple):
    """When each rank becomes free, and the ranks in that order.

    With equal speeds: `by_free` has the ranks of each node, one node after another; `nodes` has the nodes, sorted by
    the time of their last rank (`node_free`).

    With unequal speeds: `listed` has the ranks of `lists`, one list after another; a list that is not `sorted` is
    sorted when it is used. `following` is a copy of `lists.following` without the lists that become free too late.
    `earliest[p]`: a time before which the ranks for place p of `lists.by_degree` are not free. `least_s[d]`: the
    shortest time of all items that may run on d ranks.
    """

    free: np.ndarray
    by_free: np.ndarray
    nodes: np.ndarray
    node_free: np.ndarray
    listed: np.ndarray
    sorted: np.ndarray
    following: np.ndarray
    earliest: np.ndarray
    least_s: np.ndarray


@inner
def free_ranks(busy: np.ndarray, least_s: np.ndarray, machine: Machine, lists: RankLists) -> FreeRanks:
    """Ranks that are busy until `busy`."""
    num_nodes = len(machine.first) - 1
    ranks = FreeRanks(
        busy.copy(),
        np.arange(len(busy)),
        np.arange(num_nodes),
        np.zeros(num_nodes),
        lists.ranks.copy(),
        np.zeros(len(lists.head), dtype=np.bool_),
        lists.following.copy(),
        np.zeros(len(lists.by_degree)),
        least_s,
    )
    if machine.uniform:
        _sort_nodes(ranks, 0, num_nodes - 1, machine.first)
    return ranks


@inner
def occupy(ranks: FreeRanks, members: np.ndarray, finish: float, machine: Machine, lists: RankLists) -> None:
    """Make `members` (ascending) busy until `finish`."""
    for rank in members:
        ranks.free[rank] = finish
        for place in range(lists.first_of[rank], lists.first_of[rank + 1]):
            ranks.sorted[lists.lists_of[place]] = False
    if machine.uniform:
        _sort_nodes(ranks, machine.node[members[0]], machine.node[members[-1]], machine.first)


@inner
def _sort_nodes(ranks: FreeRanks, low_node: int, high_node: int, first: np.ndarray) -> None:
    """Sort the ranks of the nodes from `low_node` to `high_node`, and the nodes, again by the time at which they become
    free.
    """
    for node in range(low_node, high_node + 1):
        insertion_sort(ranks.by_free, first[node], first[node + 1], ranks.free)
        ranks.node_free[node] = ranks.free[ranks.by_free[first[node + 1] - 1]]
    insertion_sort(ranks.nodes, 0, len(ranks.nodes), ranks.node_free)
