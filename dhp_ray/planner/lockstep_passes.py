"""Assigns images to encoder passes if ranks run passes in lockstep: every rank runs the same number of passes, and the
parts of a pass on different ranks should take the same time.

First come the images whose parts exchange: all parts of one image get the same pass number, the first that is free on
all of their ranks, and no other image of these ranks shares that pass. There are as few passes as hold the images of
every rank, `most` patches each or one larger image. Then each rank's other images are placed, longest first, into the
pass with room that lacks most of its target length. The target is the length of the exchanging parts that other ranks
run in that pass, or an equal share of the rank's remaining work. (Without such parts that is the pass with least so
far: longest processing time first, Graham 1969.) Seconds are those of the ranks at their own speeds.

    at most 100 patches a pass, a second for ten      pass 0    pass 1    pass 2
    rank 0, images of 70, 60, 40, 30, 20 patches      70        60 20     40 30
    rank 1, images of 60, 60, 60                      60        60        60
    seconds of the pass                               7         8         7

Two passes are not enough: rank 1 needs three. With an image in two parts of 5 seconds:

    at most 100 patches a pass                        pass 0    pass 1
    rank 0, a part of 50, images of 30, 20            part      30 20
    rank 1, a part of 50, an image of 40              part      40
    rank 2, images of 40, 30, 20, 10                  40 10     30 20
    seconds of the pass                               5         5
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.sorting import ascending


@compiled
def lockstep_passes(
    seconds: np.ndarray, patches: np.ndarray, encoder: np.ndarray, ring: np.ndarray, num_ranks: int, most: int
) -> np.ndarray:
    """The pass of each image or part on its rank, from 0 on. `ring`: for a part that exchanges, the number of its image
    among the images with such parts, in plan order; otherwise -1. `most` 0: no limit.
    """
    passes = np.zeros(len(seconds), dtype=np.int64)
    num_rings = 0 if len(ring) == 0 else ring.max() + 1
    if most == 0 and num_rings == 0:
        return passes
    begin, length = _rings(seconds, encoder, ring, num_ranks, num_rings, passes)
    order, load = ascending(-seconds), np.zeros(num_ranks)
    if most > 0:
        for image in range(len(seconds)):
            if ring[image] < 0:
                load[encoder[image]] += min(patches[image], most)
    count = max(begin.max(), 1)
    if most > 0:
        count = max(count, int(np.ceil(load.max() / most)))
    while not _fits(seconds, patches, encoder, ring, num_ranks, most, count, length, order, passes):
        count += 1
    return passes


@inner
def _rings(
    seconds: np.ndarray, encoder: np.ndarray, ring: np.ndarray, num_ranks: int, num_rings: int, passes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Write the passes of parts that exchange; returns (the pass after those of each rank, the length of each pass)"""
    begin, length = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_rings)
    for number in range(num_rings):
        place = 0
        for part in range(len(ring)):
            if ring[part] == number:
                place = max(place, begin[encoder[part]])
        for part in range(len(ring)):
            if ring[part] == number:
                passes[part], begin[encoder[part]] = place, place + 1
                length[place] = max(length[place], seconds[part])
    return begin, length


@inner
def _fits(
    seconds: np.ndarray, patches: np.ndarray, encoder: np.ndarray, ring: np.ndarray, num_ranks: int, most: int,
    count: int, length: np.ndarray, order: np.ndarray, passes: np.ndarray,
) -> bool:
    """Fill `count` passes; return whether all images found room."""
    missing, filled = np.zeros((num_ranks, count)), np.zeros((num_ranks, count))
    taken, share, equal = np.zeros((num_ranks, count), dtype=np.bool_), np.zeros(num_ranks), np.zeros(num_ranks)
    num_ringed = 0
    for place in range(len(length)):
        num_ringed += length[place] > 0
    for part in range(len(ring)):
        if ring[part] >= 0:
            taken[encoder[part], passes[part]] = True
        else:
            share[encoder[part]] += seconds[part]
    for rank in range(num_ranks):
        for number in range(num_ringed):
            if not taken[rank, number]:
                missing[rank, number] = length[number]
                share[rank] -= length[number]
        equal[rank] = max(0.0, share[rank]) / max(1, count - num_ringed)
        missing[rank, num_ringed:] = equal[rank]
    for image in order:
        if ring[image] >= 0:
            continue
        rank, best = encoder[image], -1
        for number in range(count):
            room = most == 0 or filled[rank, number] == 0 or filled[rank, number] + patches[image] <= most
            if room and not taken[rank, number] and (best < 0 or missing[rank, number] > missing[rank, best]):
                best = number
        if best < 0:
            return False
        passes[image] = best
        missing[rank, best] -= seconds[image]
        filled[rank, best] += patches[image]
    return True
