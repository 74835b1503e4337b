"""Power-of-two degrees: each sequence gets the least power of two that holds it; packs go, slowest first, to the aligned ranks that are free first."""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.packing import best_fit_decreasing
from dhp_ray.planner.paper import pack_times
from dhp_ray.planner.problem import Placement, Problem


def pow2(problem: Problem) -> list[Placement]:
    """Sequences of one degree are packed by best fit; a group of d ranks starts at a multiple of d. O(packs x ranks)."""
    num_ranks = problem.cluster.num_ranks
    degrees = np.minimum(2 ** np.ceil(np.log2(problem.minimum_degree)).astype(np.int64), num_ranks)
    packs: list[tuple[float, int, list[int]]] = []
    for degree in np.unique(degrees).tolist():
        rows = np.flatnonzero(degrees == degree)
        grouped = [rows[pack].tolist() for pack in best_fit_decreasing(
            problem.tokens[rows], problem.minimum_degree[rows], problem.cluster.tokens_per_rank, degree)]
        packs += zip(pack_times(problem, grouped)[:, degree - 1].tolist(), [degree] * len(grouped), grouped)
    packs.sort(key=lambda pack: (-pack[0], -pack[1], pack[2]))
    if problem.sync == "micro_batch":
        return _lockstep(packs, num_ranks)
    free = np.zeros(num_ranks)
    placements = []
    for seconds, degree, members in packs:
        blocks = free[:num_ranks // degree * degree].reshape(-1, degree).max(axis=1)
        block = int(blocks.argmin())
        free[block * degree:(block + 1) * degree] = blocks[block] + seconds
        placements.append(Placement(tuple(range(block * degree, (block + 1) * degree)), tuple(members)))
    return placements


def _lockstep(packs: list[tuple[float, int, list[int]]], num_ranks: int) -> list[Placement]:
    """Each pack in the first micro-batch with a free aligned block."""
    taken: list[np.ndarray] = []
    placements = []
    for _, degree, rows in packs:
        for index in range(len(taken) + 1):
            if index == len(taken):
                taken.append(np.zeros(num_ranks, dtype=bool))
            blocks = taken[index][:num_ranks // degree * degree].reshape(-1, degree).any(axis=1)
            if not blocks.all():
                break
        block = int(blocks.argmin())
        taken[index][block * degree:(block + 1) * degree] = True
        placements.append(Placement(tuple(range(block * degree, (block + 1) * degree)), tuple(rows), index))
    return sorted(placements, key=lambda placement: placement.micro_batch)
