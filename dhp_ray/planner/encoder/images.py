"""Images of a batch that are encoded apart from its packs, as arrays: whole images, and each part of a split image.

    image    0    1    1    2        image 1 is in two parts
    rank     2    0    1    2

Which images are cut in time, into parts that several ranks encode? An image that alone takes longer than the mean of
all ranks holds the other ranks up, whichever rank encodes it. It is cut into the fewest parts that each take at most a
limit. If there is no such number, it is cut into the number whose parts take least. The limit is one of LIMITS between
the longest image and the mean. It is chosen so that the longest part or whole image is shortest. Among equal ones the
largest limit is taken, which cuts fewest images.

    one image of 12 s in 12 steps, 12 of 1 s, 4 ranks       2 parts of 6 s    rank 0  |----6----|
    the mean is 6 s                                                           rank 1  |----6----|
                                                                              ranks 2, 3  |1|1|1|1|1|1|

If no rank's memory holds the activations of an image, it is cut into at least as many parts as memory requires.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.plan.types import Grid, shares
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule, firsts_of, group_of_row


@dataclass(frozen=True)
class EncodedImages:
    """Arrays by image or part.

    image: its number in the batch. first: where each image's parts begin. seconds: of one nominal rank, forward and
    backward. activation_bytes: from the forward to the backward pass. rows: of features. group: the group that runs its
    sequence. encoder: the rank that encodes it.
    """

    image: np.ndarray
    first: np.ndarray
    seconds: np.ndarray
    patches: np.ndarray
    activation_bytes: np.ndarray
    rows: np.ndarray
    group: np.ndarray
    encoder: np.ndarray

    def on_ranks(self, encoder: np.ndarray) -> EncodedImages:
        return replace(self, encoder=encoder)

    def split(self) -> np.ndarray:
        """The images in several parts, in the order of the batch."""
        return np.flatnonzero(np.diff(self.first) > 1)

    def parts(self, image: int) -> slice:
        return slice(int(self.first[image]), int(self.first[image + 1]))


def encoded_images(problem: Problem, schedule: Schedule, num_parts: np.ndarray) -> EncodedImages:
    """The images of a batch whose packs run by this schedule, each in so many parts. No encoders are assigned yet."""
    row = np.repeat(np.arange(len(problem.samples)), np.diff(problem.first_image))
    first, image = firsts_of(num_parts), np.repeat(np.arange(len(num_parts)), num_parts)
    patches = problem.all_image_patches[image]
    found = EncodedImages(image, first, problem.all_image_s[image], patches,
                          problem.cost.encoder_bytes_per_patch * patches, problem.all_image_rows[image],
                          group_of_row(schedule)[row][image], np.zeros(len(image), dtype=np.int64))
    for number in found.split().tolist():
        parts = found.parts(number)
        share = np.array(shares(grid_of(problem, number), parts.stop - parts.start))
        for of_part in (found.seconds, found.patches, found.rows, found.activation_bytes):
            of_part[parts] *= share
    return found


def grid_of(problem: Problem, image: int) -> Grid:
    row = int(np.searchsorted(problem.first_image, image, side="right")) - 1
    return problem.samples[row].vision_grids[image - int(problem.first_image[row])]


LIMITS = 16
"""Number of limits that are tried, evenly spaced from the longest image to the mean."""


def parts_for_memory(
    grid_of: Callable[[int], Grid], patches: np.ndarray, room_bytes: float, num_ranks: int, cost: CostModel
) -> np.ndarray | None:
    """The fewest parts of each image that fit into `room_bytes` of a rank; None if some image fits in no number of
    parts. `grid_of`: the grid of an image, by its number.
    """
    counts = np.ones(len(patches), dtype=np.int64)
    for image in np.flatnonzero(cost.encoder_bytes_per_patch * patches > room_bytes).tolist():
        grid = grid_of(image)
        of_image = cost.encoder_bytes_per_patch * prod(grid)
        count = next((number for number in range(2, min(num_ranks, grid[0]) + 1)
                      if of_image * shares(grid, number)[0] <= room_bytes), None)
        if count is None:
            return None
        counts[image] = count
    return counts


def parts_for_time(
    grid_of: Callable[[int], Grid], seconds: np.ndarray, least: np.ndarray, speeds: np.ndarray
) -> np.ndarray:
    """The number of parts of each image, as above: at least `least`, and at most twice the number that brings the
    longest image to the mean.
    """
    fastest, mean_s = float(speeds.max()), float(seconds.sum() / speeds.sum())
    above = np.flatnonzero(seconds / fastest > mean_s * (1 + 1e-9))
    if not len(above):
        return least
    longest_s = float(seconds[above].max())
    most = min(len(speeds), 2 * math.ceil(longest_s / fastest / mean_s))
    part_s = _longest_parts([grid_of(image) for image in above.tolist()], seconds[above], least[above], most)
    counts, best_s = least, np.inf
    for limit_s in np.linspace(longest_s, fastest * mean_s, LIMITS):
        within = part_s <= limit_s * (1 + 1e-9)
        place = np.where(within.any(axis=1), within.argmax(axis=1), part_s.argmin(axis=1))
        end_s = max(part_s[np.arange(len(place)), place].max() / fastest, mean_s)
        if end_s < best_s:
            counts, best_s = least.copy(), end_s
            counts[above] = place + 1
    return counts


def _longest_parts(grids: Sequence[Grid], seconds: np.ndarray, least: np.ndarray, most: int) -> np.ndarray:
    """For each image in 1, 2, ... `most` parts the seconds of the largest part on a nominal rank; infinite if the image
    cannot have that many parts, or must have more.
    """
    steps, counts = np.array(grids)[:, :1], np.arange(1, max(most, int(least.max())) + 1)[None, :]
    part_s = -(-steps // counts) / steps * seconds[:, None]
    part_s[(counts > steps) | (counts < least[:, None])] = np.inf
    return part_s
