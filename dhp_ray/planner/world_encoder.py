"""Chooses which rank encodes which image, if any rank may: images are balanced over all ranks, but stay at home, on a
rank of their own group, if that costs nothing.

1. Longest processing time first (Graham 1969) with a preference. Let T be the least time that any assignment can take:
the mean over all ranks, or the largest image on the fastest rank. Images come longest first. Each goes to a rank of its
own group if one ends by T with it, otherwise to the rank of the whole cluster that ends first with it:

    images 6 (group of rank 0)  2 2 (rank 0)  2 (rank 1), T = 6        rank 0  |--6--|
                                                                      rank 1  |2|2|2|    two of them from rank 0's group

2. If that ends later than T, the fullest rank and others exchange images until all end by T, or no exchange helps
(`rebalancing`).

3. If the result is far from T, both steps are repeated from another start, longest first without the preference, and
then from best fit: images come largest first, each goes to the rank with the least room that holds it under a limit,
and bisection finds the least limit under which all images find room (MULTIFIT, Coffman, Garey and Johnson 1978; after
LPT: Lee and Massey 1988). The best result is taken:

    images 5 3 2 2 2 2, 2 ranks, T = 8     longest first    rank 0  |--5--|-2-|-2-|    9 (no exchange helps)
                                                            rank 1  |--3--|-2-|-2-|    7

                                           best fit         rank 0  |--5--|--3--|          8
                                                            rank 1  |-2-|-2-|-2-|-2-|      8

There is one heap of ranks for each speed, so an image costs O(speeds + its group's ranks + log ranks).
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.best_fit import OWNER, ROOM, add, first_with, rooms_for, shrink
from dhp_ray.planner.primitives.bisection import compiled_halve
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.heap import sift_down
from dhp_ray.planner.primitives.rebalancing import Loads, rebalance
from dhp_ray.planner.primitives.sorting import ascending

EVEN, FAR = 1e-3, 1e-2
"""Shares above the least time: within EVEN the ranks are balanced; beyond FAR another start is tried."""

PARTNERS = 128
"""Number of ranks with which the fullest rank tries to exchange images."""

AT_HOME, ANYWHERE, BEST_FIT = 0, 1, 2
"""The starts, in this order."""


@compiled
def balanced_encoders(
    image_s: np.ndarray, group_of_image: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray, speeds: np.ndarray
) -> np.ndarray:
    """The rank that encodes each image.

    `image_s`: seconds of each on a nominal rank. Group g has the ranks `ranks[first_rank[g]:first_rank[g + 1]]`.
    """
    encoder, num_ranks = np.zeros(len(image_s), dtype=np.int64), len(speeds)
    if len(image_s) == 0:
        return encoder
    order, least_s = ascending(-image_s), max(image_s.sum() / speeds.sum(), image_s.max() / speeds.max())
    loads = Loads(image_s, np.zeros(len(image_s), dtype=np.int64), speeds, 1, 0.0)
    no_tokens, nobody = np.zeros(num_ranks, dtype=np.int64), np.zeros(len(first_rank), dtype=np.int64)
    best, best_s = encoder, np.inf
    for start in (AT_HOME, ANYWHERE, BEST_FIT):
        if start == BEST_FIT:
            end_s = _fullest_first(image_s, order, speeds, least_s, best_s, encoder)
        else:
            homes = first_rank if start == AT_HOME else nobody
            end_s = _longest_first(image_s, order, group_of_image, ranks, homes, speeds, least_s, encoder)
        rebalance(loads, encoder, end_s, no_tokens, least_s * (1 + EVEN), PARTNERS)
        if end_s.max() < best_s:
            best, best_s = encoder.copy(), end_s.max()
        if best_s <= least_s * (1 + FAR):
            break
    return best


@inner
def _longest_first(
    image_s: np.ndarray, order: np.ndarray, group_of_image: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray,
    speeds: np.ndarray, least_s: float, encoder: np.ndarray,
) -> np.ndarray:
    """When each rank ends; sets `encoder`."""
    num_ranks = len(speeds)
    heap = ascending(-speeds)  # ranks of one speed are neighbours, and a heap as long as all are free
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
    load = np.zeros(num_ranks)
    for image in order:
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
        sift_down(heap, place, load, place[best], begin[place[best]], ends[place[best]])
    return load


@inner
def _fullest_first(
    image_s: np.ndarray, order: np.ndarray, speeds: np.ndarray, least_s: float, most_s: float, encoder: np.ndarray
) -> np.ndarray:
    """The same for the least limit under which best fit finds room for all images; infinite if that is not below
    `most_s`.
    """
    end_s, span = np.full(len(speeds), np.inf), np.array([least_s, most_s, 0.0])
    while compiled_halve(span, EVEN):
        span[int(_best_fit(image_s, order, speeds, span[2], encoder))] = span[2]
    if span[1] < most_s and _best_fit(image_s, order, speeds, span[1], encoder):
        end_s = np.zeros(len(speeds))
        for image in order:
            end_s[encoder[image]] += image_s[image] / speeds[encoder[image]]
    return end_s


@inner
def _best_fit(
    image_s: np.ndarray, order: np.ndarray, speeds: np.ndarray, limit_s: float, encoder: np.ndarray
) -> bool:
    """Whether best fit finds room for all images within a limit; sets `encoder`."""
    rooms, state = rooms_for(len(speeds))
    for rank in range(len(speeds)):
        add(rooms, state, limit_s * speeds[rank], rank)
    for image in order:
        place = first_with(rooms, state, image_s[image])
        if place < 0:
            return False
        encoder[image] = int(rooms[OWNER, place])
        shrink(rooms, state, place, rooms[ROOM, place] - image_s[image])
    return True
