"""Images of a batch that are encoded apart from its packs, as arrays: whole images, and each part of a split image.

    image    0    1    1    2        image 1 is in two parts
    rank     2    0    1    2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dhp_ray.planner.image_parts import shares
from dhp_ray.planner.plan import Grid
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import firsts_of


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


def encoded_images(
    problem: Problem, group_of_row: np.ndarray, num_parts: np.ndarray | Mapping[int, int]
) -> EncodedImages:
    """The images of a batch whose sequences run in these groups. `num_parts`: of each image, or of those that are
    split. No encoders are assigned yet.
    """
    count = len(problem.all_image_s)
    counts = np.ones(count, dtype=np.int64)
    if isinstance(num_parts, Mapping):
        counts[list(num_parts)] = list(num_parts.values())
    else:
        counts = num_parts
    row = np.repeat(np.arange(len(problem.samples)), np.diff(problem.first_image))
    first, image = firsts_of(counts), np.repeat(np.arange(count), counts)
    patches = problem.all_image_patches[image]
    found = EncodedImages(image, first, problem.all_image_s[image], patches,
                          problem.cost.encoder_bytes_per_patch * patches, problem.all_image_rows[image],
                          group_of_row[row][image], np.zeros(len(image), dtype=np.int64))
    for number in found.split().tolist():
        parts = found.parts(number)
        share = np.array(shares(grid_of(problem, number), parts.stop - parts.start))
        for of_part in (found.seconds, found.patches, found.rows, found.activation_bytes):
            of_part[parts] *= share
    return found


def grid_of(problem: Problem, image: int) -> Grid:
    """The patches of an image of the batch."""
    row = int(np.searchsorted(problem.first_image, image, side="right")) - 1
    return problem.samples[row].vision_grids[image - int(problem.first_image[row])]
