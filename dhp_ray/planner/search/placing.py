"""Chooses the ranks of a micro-batch's groups: from the pool, then inside nodes, then across."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.problem import Machine, Problem
from dhp_ray.planner.schedule import firsts_of


class CachedGroups(NamedTuple):
    """Group i is ranks[first[i]:first[i + 1]], ascending."""

    ranks: np.ndarray
    first: np.ndarray


def cached_groups_of(problem: Problem) -> CachedGroups:
    """Groups of the pool that fit this cluster, least recently used first."""
    usable = [
        ranks for ranks in problem.pool if len(ranks) > 1 and min(ranks) >= 0 and max(ranks) < problem.cluster.num_ranks
    ]
    return CachedGroups(
        np.array([rank for ranks in usable for rank in sorted(ranks)], dtype=np.int64),
        firsts_of([len(ranks) for ranks in usable]),
    )


@compiled
def ranks_of(first: np.ndarray, machine: Machine, order: np.ndarray, pool: CachedGroups) -> np.ndarray:
    """The ranks of each group, ascending, one group after another; no rank twice. Group g has first[g + 1] - first[g]
    ranks.

    On a uniform machine, largest group first: a group of the pool whose ranks are all free (the most recently used
    one), but none that crosses nodes if that takes longer and a node has room; otherwise the node with the fewest free
    ranks that holds the group; otherwise whole nodes, and the rest from the node that it fills best. On any other
    machine, group g has the ranks from place `first[g]` of `order` on, for which its time was predicted.
    O(groups x (nodes + pool)).
    """
    ranks, num_ranks = np.zeros(first[-1], dtype=np.int64), len(machine.speeds)
    if not machine.uniform:
        for group in range(len(first) - 1):
            ranks[first[group] : first[group + 1]] = np.sort(order[first[group] : first[group + 1]])
        return ranks
    free, num_free = np.ones(num_ranks, dtype=np.bool_), np.zeros(len(machine.first) - 1, dtype=np.int64)
    for node in machine.node:
        num_free[node] += 1
    for group in ascending((first[:-1] - first[1:]).astype(np.float64)):
        chosen = ranks[first[group] : first[group + 1]]
        rate = machine.rates[len(chosen)]
        stays_inside = rate.across_s > rate.inside_s and len(chosen) <= num_free.max()
        if not _from_pool(chosen, free, pool, machine.node, stays_inside):
            _fresh(chosen, free, num_free, machine.first)
        for rank in chosen:
            free[rank] = False
            num_free[machine.node[rank]] -= 1
    return ranks


@inner
def _from_pool(
    chosen: np.ndarray, free: np.ndarray, pool: CachedGroups, node: np.ndarray, stays_inside: bool
) -> bool:
    """Fill `chosen` with a free group of the pool, if there is one; with `stays_inside` one of a single node."""
    for index in range(len(pool.first) - 2, -1, -1):
        group = pool.ranks[pool.first[index] : pool.first[index + 1]]
        all_free = len(group) == len(chosen) > 1
        for place in range(len(group)):
            all_free = all_free and free[group[place]]
            if not all_free:
                break
            chosen[place] = group[place]
        if all_free and not (stays_inside and node[chosen[0]] != node[chosen[-1]]):
            return True
    return False


@inner
def _fresh(chosen: np.ndarray, free: np.ndarray, num_free: np.ndarray, first: np.ndarray) -> None:
    """Fill `chosen` from one node after another."""
    need, taken = len(chosen), 0
    used = np.zeros(len(num_free), dtype=np.bool_)
    while taken < need:
        best = -1
        for node in range(
            len(num_free)
        ):  # of the nodes that hold the rest, the one with the fewest free ranks; else the one with the most
            if used[node] or num_free[node] == 0:
                continue
            holds, best_holds = num_free[node] >= need - taken, best >= 0 and num_free[best] >= need - taken
            if (
                best < 0
                or (holds and (not best_holds or num_free[node] < num_free[best]))
                or (not holds and not best_holds and num_free[node] > num_free[best])
            ):
                best = node
        used[best] = True
        for rank in range(first[best], first[best + 1]):
            if free[rank] and taken < need:
                chosen[taken] = rank
                taken += 1
    chosen[:] = chosen[ascending(chosen.astype(np.float64))]
