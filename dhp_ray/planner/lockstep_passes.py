"""Assigns images to encoder passes if ranks run passes in lockstep: every rank runs the same number of passes, and what
ranks encode in a pass should take the same time.

There are as few passes as hold the images of every rank, `most` patches each or one larger image. Each rank's images
are placed, longest first, into the pass with room that has least so far (longest processing time first, Graham 1969).
Seconds are those of the ranks at their own speeds.

    at most 100 patches a pass, a second for ten      pass 0    pass 1    pass 2
    rank 0, images of 70, 60, 40, 30, 20 patches      70        60 20     40 30
    rank 1, images of 60, 60, 60                      60        60        60
    seconds of the pass                               7         8         7

Two passes are not enough: rank 1 needs three.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.sorting import ascending


@compiled
def lockstep_passes(
    seconds: np.ndarray, patches: np.ndarray, encoder: np.ndarray, num_ranks: int, most: int
) -> np.ndarray:
    """The pass of each image or part on its rank, from 0 on. `most` 0: no limit."""
    passes = np.zeros(len(seconds), dtype=np.int64)
    if most == 0:
        return passes
    order, load = ascending(-seconds), np.zeros(num_ranks)
    for image in range(len(seconds)):
        load[encoder[image]] += min(patches[image], most)
    count = max(1, int(np.ceil(load.max() / most)))
    while not _fits(seconds, patches, encoder, num_ranks, most, count, order, passes):
        count += 1
    return passes


@inner
def _fits(
    seconds: np.ndarray, patches: np.ndarray, encoder: np.ndarray, num_ranks: int, most: int, count: int,
    order: np.ndarray, passes: np.ndarray,
) -> bool:
    """Fill `count` passes; return whether all images found room."""
    taken_s, filled = np.zeros((num_ranks, count)), np.zeros((num_ranks, count))
    for image in order:
        rank, best = encoder[image], -1
        for number in range(count):
            room = filled[rank, number] == 0 or filled[rank, number] + patches[image] <= most
            if room and (best < 0 or taken_s[rank, number] < taken_s[rank, best]):
                best = number
        if best < 0:
            return False
        passes[image] = best
        taken_s[rank, best] += seconds[image]
        filled[rank, best] += patches[image]
    return True
