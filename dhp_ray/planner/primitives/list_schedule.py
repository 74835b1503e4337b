"""List scheduling: packs in a given order, each as soon as the last of its ranks is free (Graham 1969): on given ranks,
on the ranks that are free first, or on the aligned block that finishes it first.

packs a, b, c on ranks (0, 1), (1,), (0,)     rank 0  |--a--|---c----|
                                              rank 1  |--a--|-b-|
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled


@compiled
def run_next(ranks: np.ndarray, time_s: float, free: np.ndarray) -> float:
    """The start of the next pack, on `ranks`. `free`: when each rank is free; it is updated."""
    start = 0.0
    for rank in ranks:
        start = max(start, free[rank])
    for rank in ranks:
        free[rank] = start + time_s
    return start


@compiled
def list_schedule(
    ranks: np.ndarray, first_rank: np.ndarray, times: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """(start of each pack, end of each rank) if pack p runs on ranks[first_rank[p]:first_rank[p + 1]] for times[p]
    seconds.
    """
    return list_schedule_from(np.zeros(num_ranks), ranks, first_rank, times)


@compiled
def list_schedule_from(
    ready_s: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray, times: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The same on ranks that are free from `ready_s` on."""
    starts, free = np.zeros(len(times)), ready_s.copy()
    for pack in range(len(times)):
        starts[pack] = run_next(ranks[first_rank[pack] : first_rank[pack + 1]], times[pack], free)
    return starts, free


@compiled
def on_earliest_blocks(need: np.ndarray, seconds: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """The first rank of each pack's block: the aligned block that finishes the pack first. O(packs x ranks)."""
    free, first = np.zeros(len(speeds)), np.zeros(len(need), dtype=np.int64)
    for pack in range(len(need)):
        degree, best = need[pack], np.inf
        for begin in range(0, len(free) - degree + 1, degree):
            start, slowest = 0.0, np.inf
            for rank in range(begin, begin + degree):
                start, slowest = max(start, free[rank]), min(slowest, speeds[rank])
            if start + seconds[pack] / slowest < best:
                first[pack], best = begin, start + seconds[pack] / slowest
        free[first[pack] : first[pack] + degree] = best
    return first
