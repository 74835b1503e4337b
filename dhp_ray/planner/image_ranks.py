"""Chooses the rank that encodes each image or part, if any rank may: images and parts are balanced (`world_encoder`),
each on a rank of its own group if that costs nothing, and the parts of an image each on a different rank.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.encoded_images import EncodedImages, grid_of
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.world_encoder import balanced_encoders


def one_part_more(problem: Problem, images: EncodedImages) -> np.ndarray | None:
    """The numbers of parts with one more for the image that takes the fullest rank longest; None if it already has the
    most.
    """
    seconds = images.seconds / problem.speeds[images.encoder]
    fullest = int(np.bincount(images.encoder, seconds).argmax())
    image = int(images.image[np.where(images.encoder == fullest, seconds, 0.0).argmax()])
    return with_one_more(problem, np.diff(images.first), image)


def with_one_more(problem: Problem, num_parts: np.ndarray, image: int) -> np.ndarray | None:
    """The numbers of parts with one more for an image; None if it already has the most."""
    if num_parts[image] >= min(problem.cluster.num_ranks, grid_of(problem, image)[0]):
        return None
    more = num_parts.copy()
    more[image] += 1
    return more


def ranks_of_images(problem: Problem, schedule: Schedule, images: EncodedImages) -> np.ndarray:
    """The rank of each image or part. Without vision costs patches are balanced instead of seconds."""
    costs = problem.all_image_s.any()
    seconds, speeds = (images.seconds, problem.speeds) if costs else (images.patches, np.ones(len(problem.speeds)))
    encoder = balanced_encoders(seconds, images.group, schedule.ranks, schedule.first_rank, speeds)
    load_s = np.bincount(encoder, seconds, len(speeds)) / speeds
    for image in images.split().tolist():
        _spread(encoder, load_s, seconds, speeds, images.parts(image))
    return encoder


def _spread(encoder: np.ndarray, load_s: np.ndarray, seconds: np.ndarray, speeds: np.ndarray, parts: slice) -> None:
    """Move the parts of an image to different ranks: a part that shares its rank goes to the rank that ends first with
    it, among those without a part.
    """
    taken = set[int]()
    for part in range(parts.start, parts.stop):
        rank = int(encoder[part])
        if rank in taken:
            load_s[rank] -= seconds[part] / speeds[rank]
            ends_s = load_s + seconds[part] / speeds
            ends_s[list(taken)] = np.inf
            rank = encoder[part] = int(ends_s.argmin())
            load_s[rank] = ends_s[rank]
        taken.add(rank)
