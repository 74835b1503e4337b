"""Ranks for the groups of one micro-batch: from the pool, then inside nodes, then across."""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.problem import Problem, Ranks


def ranks_of(problem: Problem, degree: np.ndarray, first: np.ndarray) -> list[Ranks]:
    """The ranks of each group, ascending, no rank twice.

    Where all ranks are equally fast: groups larger than a node take whole nodes first; then, largest first, a group of the pool whose ranks are all free, else
    the node with the fewest free ranks that hold it, else any free ranks. Where they are not, group g has the ranks from place `first[g]` of the ranks by
    speed, as its time was predicted. O(groups x (nodes + pool)).
    """
    cluster = problem.cluster
    if len(set(cluster.speeds)) > 1:
        by_speed = np.argsort(-np.array(cluster.speeds), kind="stable")
        return [tuple(np.sort(by_speed[begin:begin + size]).tolist()) for begin, size in zip(first.tolist(), degree.tolist())]
    size = cluster.ranks_per_node
    nodes = [list(range(begin, min(begin + size, cluster.num_ranks))) for begin in range(0, cluster.num_ranks, size)]
    pool: dict[int, list[Ranks]] = {}
    for ranks in reversed(problem.pool):  # the one used last first
        if len(ranks) > 1 and max(ranks) < cluster.num_ranks:
            pool.setdefault(len(ranks), []).append(tuple(sorted(ranks)))
    chosen: list[Ranks] = [()] * len(degree)
    for group in np.argsort(-degree, kind="stable").tolist():
        need = int(degree[group])
        known = [ranks for ranks in pool.get(need, []) if all(rank in nodes[rank // size] for rank in ranks)]
        ranks = known[0] if known else _fresh(nodes, need, size)
        for rank in ranks:
            nodes[rank // size].remove(rank)
        chosen[group] = ranks
    return chosen


def _fresh(nodes: list[list[int]], need: int, size: int) -> Ranks:
    if need <= size:
        fitting = [(len(free), node) for node, free in enumerate(nodes) if len(free) >= need]
        if fitting:
            return tuple(nodes[min(fitting)[1]][:need])
    fullest = sorted(range(len(nodes)), key=lambda node: (-len(nodes[node]), node))
    ranks: list[int] = []
    for node in fullest:
        left = need - len(ranks)
        if left < len(nodes[node]):  # the rest from the node that it fills best
            rest = [(len(nodes[other]), other) for other in fullest if len(nodes[other]) >= left and not set(nodes[other]) & set(ranks)]
            node = min(rest)[1]
        ranks += nodes[node][:left]
        if len(ranks) == need:
            break
    return tuple(sorted(ranks))
