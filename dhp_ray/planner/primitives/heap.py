"""Ranks in a heap with the least loaded rank on top."""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import inner


@inner
def sift_down(heap: np.ndarray, place: np.ndarray, load: np.ndarray, position: int, begin: int, end: int) -> None:
    """Move a rank whose load has risen to its place in the heap at `heap[begin:end]`. `place`: the place of each rank.
    """
    rank = heap[position]
    while True:
        child = begin + 2 * (position - begin) + 1
        if child >= end:
            break
        if child + 1 < end and load[heap[child + 1]] < load[heap[child]]:
            child += 1
        if load[heap[child]] >= load[rank]:
            break
        heap[position] = heap[child]
        place[heap[position]] = position
        position = child
    heap[position] = rank
    place[rank] = position
