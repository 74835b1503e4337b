"""Lists of ranks of similar speed, in which an item looks for ranks if speeds are unequal (`candidates`).

A group is as slow as its slowest rank, so its ranks should have about the same speed. Ranks are sorted by speed, inside
each node and in the whole cluster, and cut into runs:

    inside a node    from each speed on, all ranks of it and faster  speeds 0.9 1.0 1.0 1.1: lists of 4, 3 and 1 ranks
    in the cluster   from every 16th rank on, the next 64; groups of more than 16 ranks have runs four times as long,
                     from every 64th rank on; and so on. If there are few speeds, also from the first rank of each on,
                     so that a group of nearly all ranks can leave out exactly the slow ones

The total speed of the d slowest ranks of a list, over d times the slowest speed, is the least factor (`stretch`) by
which a group of d ranks of this list increases its area; lists with the smallest stretch come first. O(ranks x (log
ranks + ranks of a node)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Machine
from dhp_ray.planner.schedule import by_owner, firsts_of

RUN, RUNS = 64, 16
"""RUN: ranks in a run of the cluster, for groups of up to a quarter of that. RUNS: about how many runs begin in a small
cluster, and the most speeds that begin one each.
"""


class RankLists(NamedTuple):
    """List i is ranks[first[i]:first[i + 1]], slowest first.

    head[i]: its slowest rank, if another list is the same without that rank; groups without the head are found in that
    other list, as groups of faster ranks. Otherwise -1.

    Rank r is in lists_of[first_of[r]:first_of[r + 1]]. The lists for groups of d ranks are
    by_degree[begin[k]:begin[k + 1]], k = 2 d inside nodes and 2 d + 1 across them, with the smallest `stretch` first;
    `speed` is that of their slowest ranks. following[p] is the next place after p, and following[len(by_degree) + k]
    the first of kind k.
    """

    ranks: np.ndarray
    first: np.ndarray
    head: np.ndarray
    lists_of: np.ndarray
    first_of: np.ndarray
    by_degree: np.ndarray
    stretch: np.ndarray
    speed: np.ndarray
    begin: np.ndarray
    following: np.ndarray


def rank_lists(machine: Machine) -> RankLists:
    """The lists of a cluster; none if all ranks have the same speed."""
    speeds, num_ranks = machine.speeds, len(machine.speeds)
    if machine.uniform:
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
        return RankLists(
            none, firsts_of([]), none, none, firsts_of([0] * num_ranks), none, nothing, nothing, none, none
        )
    orders = np.concatenate([np.lexsort((speeds, machine.node)), np.argsort(speeds, kind="stable")])
    rising = speeds[orders]
    starts = [
        np.flatnonzero((np.diff(rising[:num_ranks], prepend=0.0) != 0) | (np.diff(machine.node, prepend=-1) != 0))
    ]
    ends, least, most = (
        [machine.first[machine.node[starts[0]] + 1]],
        [np.ones_like(starts[0])],
        [machine.ranks_per_node * np.ones_like(starts[0])],
    )
    run, smallest = RUN, 1
    faster = np.flatnonzero(np.diff(rising[num_ranks:])) + 1
    while smallest <= num_ranks:
        start = np.arange(0, num_ranks, min(run // 4, -(-num_ranks // RUNS)))
        if len(faster) <= RUNS:
            start = np.union1d(start, faster)
        starts.append(num_ranks + start)
        ends.append(num_ranks + np.minimum(start + run, num_ranks))
        least.append(np.full_like(start, smallest))
        most.append(np.full_like(start, num_ranks if run >= num_ranks else run // 4))
        smallest, run = most[-1][0] + 1, 4 * run
    start, end, least_degree, most_degree = (np.concatenate(pieces) for pieces in (starts, ends, least, most))
    sizes = end - start
    first = firsts_of(sizes)
    place = np.repeat(start - first[:-1], sizes) + np.arange(first[-1])
    before = np.concatenate([[0.0], np.cumsum(rising)])
    degree, index = np.arange(first[-1]) - np.repeat(first[:-1], sizes) + 1, np.repeat(np.arange(len(sizes)), sizes)
    speed_sum, slowest = before[place + 1] - before[start][index], rising[start]
    stretch, kind = speed_sum / (degree * slowest[index]), 2 * degree + (start >= num_ranks)[index]
    usable = np.flatnonzero((degree >= least_degree[index]) & (degree <= most_degree[index]))
    usable = usable[np.lexsort((stretch[usable], kind[usable]))]
    alone = (start < num_ranks) & ((sizes == 1) | (rising[np.minimum(start + 1, len(rising) - 1)] > slowest))
    entries, first_of = by_owner(orders[place], num_ranks)
    begin = firsts_of(np.bincount(kind[usable], minlength=2 * num_ranks + 2))
    following = np.concatenate([np.arange(1, len(usable) + 1), begin[:-1]])
    return RankLists(
        orders[place],
        first,
        np.where(alone, orders[start], -1),
        index[entries],
        first_of,
        index[usable],
        stretch[usable],
        slowest[index[usable]],
        begin,
        following,
    )
