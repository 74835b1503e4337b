"""Chooses which images are cut into parts that several ranks encode, and into how many parts.

An image that alone takes longer than the mean of all ranks holds the other ranks up, whichever rank encodes it. It is
cut into the fewest parts that each take at most a limit, including their exchange. If there is no such number, it is
cut into the number whose parts take least. The limit is one of LIMITS between the longest image and the mean. It is
chosen so that the larger of two times is least: that of the longest part or whole image, and the mean including
exchanges. Among equal ones the largest limit is taken, which cuts fewest images.

    one image of 12 s, 12 of 1 s, 4 ranks             2 parts of 6 s    rank 0  |----6----|
    the mean is 6 s                                                     rank 1  |----6----|
                                                                        ranks 2, 3  |1|1|1|1|1|1|
    with an exchange of 0.5 s for each part more      2 parts of 6.5 s: the mean is 6.25 s; of 3 parts of 5 s, 6.75 s

If no rank's memory holds the activations of an image, it is cut into at least as many parts as memory requires.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.image_parts import Grid, exchanges, most_parts, shares

LIMITS = 16
"""Number of limits that are tried, evenly spaced from the longest image to the mean."""


def exchange_s(grid: Grid, num_parts: int, cost: CostModel) -> float:
    """Seconds of a part's ring, forward and backward: keys and values of all other parts pass through each."""
    if not exchanges(grid, num_parts):
        return 0.0
    bytes_ = cost.image_comm_bytes_per_patch * prod(grid) * (num_parts - 1) / num_parts
    return bytes_ / cost.slowest_bytes_per_s + cost.image_latency_s * (num_parts - 1)


def part_bytes(grid: Grid, num_parts: int, cost: CostModel) -> float:
    """The most memory in bytes that one part takes on a rank. A part may be one window longer than an equal share."""
    if not exchanges(grid, num_parts):
        return cost.encoder_bytes_per_patch * prod(grid) * shares(grid, num_parts)[0]
    return cost.image_part_bytes_per_patch * (prod(grid) / num_parts + cost.image_piece_patches)


def parts_for_memory(
    grid_of: Callable[[int], Grid], patches: np.ndarray, room_bytes: float, num_ranks: int, cost: CostModel
) -> np.ndarray | None:
    """The fewest parts of each image that fit into `room_bytes` of a rank; None if some image fits in no number of
    parts. `grid_of`: the grid of an image, by its number.
    """
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
    """The number of parts of each image, as above: at least `least`, and at most twice the number that brings the
    longest image to the mean.
    """
    fastest, total, mean_s = float(speeds.max()), float(speeds.sum()), float(seconds.sum() / speeds.sum())
    above = np.flatnonzero(seconds / fastest > mean_s * (1 + 1e-9))
    if not len(above):
        return least
    longest_s = float(seconds[above].max())
    most = min(len(speeds), 2 * math.ceil(longest_s / fastest / mean_s))
    part_s, work_s = _choices([grid_of(image) for image in above.tolist()], seconds[above], least[above], most, cost)
    counts, best_s = least, np.inf
    for limit_s in np.linspace(longest_s, fastest * mean_s, LIMITS):
        within = part_s <= limit_s * (1 + 1e-9)
        place = np.where(within.any(axis=1), within.argmax(axis=1), part_s.argmin(axis=1))
        rows = np.arange(len(place))
        mean = (seconds.sum() - seconds[above].sum() + work_s[rows, place].sum()) / total
        end_s = max(part_s[rows, place].max() / fastest, mean)
        if end_s < best_s:
            counts, best_s = least.copy(), end_s
            counts[above] = place + 1
    return counts


def _choices(
    grids: Sequence[Grid], seconds: np.ndarray, least: np.ndarray, most: int, cost: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """For each image in 1, 2, ... `most` parts: seconds on a nominal rank of the largest part, with its exchange, and
    of all parts. The former are infinite if the image cannot have that many parts, or must have more.
    """
    steps, patches = np.array(grids)[:, :1], np.array(grids).prod(axis=1)[:, None]
    allowed = np.array([most_parts(grid, cost.image_piece_patches) for grid in grids])
    counts = np.arange(1, max(most, int(least.max())) + 1)[None, :]
    rings = counts > steps
    share = np.where(rings, 1.0 / counts, -(-steps // counts) / steps)
    sent_s = cost.image_comm_bytes_per_patch * patches * (counts - 1) / counts / cost.slowest_bytes_per_s
    exchange = np.where(rings, sent_s + cost.image_latency_s * (counts - 1), 0.0)
    part_s = share * seconds[:, None] + exchange
    work_s = seconds[:, None] + counts * exchange
    part_s[(counts > allowed[:, None]) | (counts < least[:, None])] = np.inf
    return part_s, work_s
