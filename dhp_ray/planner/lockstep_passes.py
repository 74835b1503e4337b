"""Passes of the encoder where ranks run them in lockstep: equally many on every rank, and of one number alike long.

The fewest that hold the images of every rank, `most` patches each or one larger image. A rank's images come longest
first, each to the pass with least so far of those that have room for it (longest processing time first, Graham 1969):

    at most 100 patches a pass, a second for ten      pass 0    pass 1    pass 2
    rank 0, images of 70, 60, 40, 30, 20 patches      70        60 20     40 30
    rank 1, images of 60, 60, 60                      60        60        60
    seconds of the pass                               7         8         7

Two passes would not do: rank 1 needs three.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.sorting import ascending


@compiled
def lockstep_passes(
    seconds: np.ndarray, patches: np.ndarray, encoder: np.ndarray, num_ranks: int, most: int
) -> np.ndarray:
    """The pass of its rank, from 0 on, in which each image is; `most` 0: all in one."""
    order, passes = ascending(-seconds), np.zeros(len(seconds), dtype=np.int64)
    if most == 0:
        return passes
    load = np.zeros(num_ranks)
    for image in range(len(seconds)):
        load[encoder[image]] += min(patches[image], most)
    count = 1
    for rank in range(num_ranks):
        count = max(count, int(np.ceil(load[rank] / most)))
    while not _fits(seconds, patches, encoder, num_ranks, most, count, order, passes):
        count += 1
    return passes


@inner
def _fits(
    seconds: np.ndarray, patches: np.ndarray, encoder: np.ndarray, num_ranks: int, most: int, count: int,
    order: np.ndarray, passes: np.ndarray,
) -> bool:
    """Fill `count` passes; whether all images found room."""
    spent, filled = np.zeros((num_ranks, count)), np.zeros((num_ranks, count))
    for image in order:
        rank, best = encoder[image], -1
        for number in range(count):
            room = filled[rank, number] == 0 or filled[rank, number] + patches[image] <= most
            if room and (best < 0 or spent[rank, number] < spent[rank, best]):
                best = number
        if best < 0:
            return False
        passes[image] = best
        spent[rank, best] += seconds[image]
        filled[rank, best] += patches[image]
    return True
