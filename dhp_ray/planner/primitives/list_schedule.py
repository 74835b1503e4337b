"""List scheduling: packs in a given order on given ranks, each as soon as the last of its ranks is free (Graham 1969).

packs a, b, c on ranks (0, 1), (1,), (0,)     rank 0  |--a--|---c----|
                                              rank 1  |--a--|-b-|
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner


@inner
def run_next(ranks: np.ndarray, time_s: float, free: np.ndarray) -> float:
    """The start of the next pack, on `ranks`; `free`: when each rank is free, before and after it."""
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
    """(start of each pack, end of each rank): pack p runs on ranks[first_rank[p]:first_rank[p + 1]] for times[p]
    seconds."""
    starts, free = np.zeros(len(times)), np.zeros(num_ranks)
    for pack in range(len(times)):
        starts[pack] = run_next(ranks[first_rank[pack] : first_rank[pack + 1]], times[pack], free)
    return starts, free
