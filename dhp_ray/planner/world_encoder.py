"""Which rank encodes which image where any rank may: balanced over all of them, at home where that costs nothing.

Longest processing time first (Graham 1969) with a preference. Let T be the least time that any assignment takes, the
mean over all ranks or the largest image on the fastest. Images come longest first; each goes to a rank of its own group
if one ends by T with it, and else to the rank of the whole cluster that ends first with it:

    images 6 (group of rank 0)  2 2 (rank 0)  2 (rank 1), T = 6        rank 0  |--6--|
                                                                      rank 1  |2|2|2|    two of them from rank 0's group

The ranks wait in one heap for each speed, so that an image costs O(speeds + its group's ranks + log ranks).
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.sorting import ascending


@compiled
def balanced_encoders(
    image_s: np.ndarray, group_of_image: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray, speeds: np.ndarray
) -> np.ndarray:
    """The rank that encodes each image.

    `image_s`: seconds of each on a nominal rank; group g has the ranks `ranks[first_rank[g]:first_rank[g + 1]]`.
    """
    num_ranks = len(speeds)
    heap = ascending(-speeds)  # ranks of one speed are neighbours; all loads 0 are a heap
    place, begin = np.empty(num_ranks, dtype=np.int64), np.empty(num_ranks, dtype=np.int64)
    ends = np.empty(num_ranks, dtype=np.int64)
    for position in range(num_ranks):
        place[heap[position]] = position
        begin[position] = position
        if position and speeds[heap[position]] == speeds[heap[position - 1]]:
            begin[position] = begin[position - 1]
    for position in range(num_ranks - 1, -1, -1):
        ends[position] = position + 1
        if position < num_ranks - 1 and begin[position + 1] == begin[position]:
            ends[position] = ends[position + 1]
    load, encoder = np.zeros(num_ranks), np.zeros(len(image_s), dtype=np.int64)
    if len(image_s) == 0:
        return encoder
    least_s = max(image_s.sum() / speeds.sum(), image_s.max() / speeds.max())
    for image in ascending(-image_s):
        group = group_of_image[image]
        best, best_s = -1, np.inf
        for member in ranks[first_rank[group] : first_rank[group + 1]]:
            if load[member] + image_s[image] / speeds[member] < best_s:
                best, best_s = member, load[member] + image_s[image] / speeds[member]
        if best_s > least_s * (1 + 1e-9):
            position = 0
            while position < num_ranks:  # the least loaded rank of each speed
                rank = heap[position]
                if load[rank] + image_s[image] / speeds[rank] < best_s:
                    best, best_s = rank, load[rank] + image_s[image] / speeds[rank]
                position = ends[position]
        encoder[image], load[best] = best, best_s
        _sift_down(heap, place, load, place[best], begin[place[best]], ends[place[best]])
    return encoder


@inner
def _sift_down(heap: np.ndarray, place: np.ndarray, load: np.ndarray, position: int, begin: int, end: int) -> None:
    """Bring a rank whose load has risen to its place in the heap at `heap[begin:end]`."""
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
