"""Which images are cut into parts that several ranks encode, and into how many.

Let T be the mean over all ranks of what encoding takes, at the fastest rank's speed. An image that alone takes longer
than that holds all others up, whoever encodes it. It is cut into the fewest parts of which each, with its exchange,
takes at most T, and where there is no such number into those that take least:

    one image of 12 s, 12 of 1 s, 4 ranks: T = 6 s    2 parts of 6 s    rank 0  |----6----|
                                                                      rank 1  |----6----|
    with an exchange of 0.5 s for each part more:     3 parts of 5 s    ranks 2, 3  |1|1|1|1|1|1|

An image of which no rank's memory holds the activations is cut into at least as many parts as it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.image_parts import Grid, exchanges, most_parts, shares


def exchange_s(grid: Grid, num_parts: int, cost: CostModel) -> float:
    """Seconds of a part's ring, forward and backward: keys and values of all other parts pass through each."""
    if not exchanges(grid, num_parts):
        return 0.0
    bytes_ = cost.image_comm_bytes_per_patch * prod(grid) * (num_parts - 1) / num_parts
    return bytes_ / cost.slowest_bytes_per_s + cost.image_latency_s * (num_parts - 1)


def part_bytes(grid: Grid, num_parts: int, cost: CostModel) -> float:
    """The most bytes that one part takes of a rank's memory. A part may be one window longer than an equal share."""
    if not exchanges(grid, num_parts):
        return cost.encoder_bytes_per_patch * prod(grid) * shares(grid, num_parts)[0]
    return cost.image_part_bytes_per_patch * (prod(grid) / num_parts + cost.image_piece_patches)


def parts_for_memory(
    grid_of: Callable[[int], Grid], patches: np.ndarray, room_bytes: float, num_ranks: int, cost: CostModel
) -> np.ndarray | None:
    """The fewest parts of each image that fit into so many bytes of a rank; None where those of one do in no number.
    `grid_of`: of an image, by its number."""
    counts = np.ones(len(patches), dtype=np.int64)
    for image in np.flatnonzero(cost.encoder_bytes_per_patch * patches > room_bytes).tolist():
        grid = grid_of(image)
        numbers = range(2, min(num_ranks, most_parts(grid, cost.image_piece_patches)) + 1)
        count = next((number for number in numbers if part_bytes(grid, number, cost) <= room_bytes), None)
        if count is None:
            return None
        counts[image] = count
    return counts


def parts_for_time(
    grid_of: Callable[[int], Grid], seconds: np.ndarray, least: np.ndarray, speeds: np.ndarray, cost: CostModel
) -> np.ndarray:
    """The parts of each image, at least `least` of them, as above."""
    counts, fastest = least.copy(), float(speeds.max())
    mean_s = float(seconds.sum() / speeds.sum()) * (1 + 1e-9)
    for image in np.flatnonzero(seconds / fastest > mean_s).tolist():
        grid, count, best_s = grid_of(image), int(least[image]), np.inf
        for number in range(count, min(len(speeds), most_parts(grid, cost.image_piece_patches)) + 1):
            longest_s = (shares(grid, number)[0] * float(seconds[image]) + exchange_s(grid, number, cost)) / fastest
            if longest_s < best_s:
                count, best_s = number, longest_s
            elif number > grid[0] + 1:  # from there on the exchange takes more than it saves
                break
            if best_s <= mean_s:
                break
        counts[image] = count
    return counts
