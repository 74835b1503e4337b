"""Chooses the rank that encodes each image or part, if any rank may.

1. Parts that exchange are placed first, those of the longest image before all others: on the existing process group of
   that many ranks that would finish first. If there is none, on the block of neighbours that would finish first: for
   two parts the blocks are (0, 1), (2, 3), ..., so that batches form the same groups. Ranks of unequal speed are first
   sorted by speed, since a group is as slow as its slowest rank.
2. Whole images and other parts are then balanced (`world_encoder`), each on a rank of its own group if that costs
   nothing.
3. Parts of an image that do not exchange are each on a different rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dhp_ray.planner.encoded_images import EncodedImages, grid_of
from dhp_ray.planner.image_parts import exchanges, most_parts
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Ranks, Schedule
from dhp_ray.planner.world_encoder import balanced_encoders

Groups = Mapping[int, Sequence[Ranks]]
"""The existing process groups, by their number of ranks."""


def groups_by_size(problem: Problem, schedule: Schedule) -> Groups:
    """The process groups of the pool and of the packs."""
    packs = np.split(schedule.ranks, schedule.first_rank[1:-1])
    found: dict[int, list[Ranks]] = {}
    for ranks in dict.fromkeys([*map(_sorted, problem.pool), *(_sorted(of_pack.tolist()) for of_pack in packs)]):
        if len(ranks) > 1 and ranks[-1] < problem.cluster.num_ranks:
            found.setdefault(len(ranks), []).append(ranks)
    return found


def _sorted(ranks: Sequence[int]) -> Ranks:
    return tuple(sorted(ranks))


def parts_on_groups(problem: Problem, num_parts: np.ndarray, groups: Groups) -> np.ndarray | None:
    """The same numbers of parts; those of an image whose parts exchange are raised to the next number for which there
    is a group, if there is one. None if no parts would be on such a group.
    """
    raised, some = num_parts.copy(), False
    for image in np.flatnonzero(num_parts > 1).tolist():
        grid, count = grid_of(problem, image), int(num_parts[image])
        most = most_parts(grid, problem.cost.image_piece_patches)
        sizes = [size for size in groups if count <= size <= most] if exchanges(grid, count) else []
        if sizes:
            raised[image], some = min(sizes), True
    return raised if some else None


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
    most = min(problem.cluster.num_ranks, most_parts(grid_of(problem, image), problem.cost.image_piece_patches))
    if num_parts[image] >= most:
        return None
    more = num_parts.copy()
    more[image] += 1
    return more


def ranks_of_images(problem: Problem, schedule: Schedule, images: EncodedImages, groups: Groups) -> np.ndarray:
    """The rank of each image or part; ranks of parts that exchange ascend. Without vision costs patches are balanced
    instead of seconds.
    """
    costs = problem.all_image_s.any()
    seconds, speeds = (images.seconds, problem.speeds) if costs else (images.patches, np.ones(len(problem.speeds)))
    encoder, busy_s = np.full(len(seconds), -1), np.zeros(len(speeds))
    split, by_speed = images.split(), np.argsort(-speeds, kind="stable").tolist()
    rings = [images.parts(image) for image in split.tolist() if images.ring[images.first[image]] >= 0]
    for parts in sorted(rings, key=lambda parts: -float(seconds[parts].sum())):
        count, part_s = parts.stop - parts.start, float(seconds[parts.start])
        there = groups.get(count) or [_sorted(by_speed[first : first + count])
                                      for first in range(0, len(speeds) - count + 1, count)]
        ends_s = [busy_s[list(ranks)].max() + part_s / speeds[list(ranks)].min() for ranks in there]
        ranks = list(there[int(np.argmin(ends_s))])
        encoder[parts], busy_s[ranks] = ranks, min(ends_s)
    others = encoder < 0
    encoder[others] = balanced_encoders(seconds[others], images.group[others], schedule.ranks, schedule.first_rank,
                                        speeds, busy_s)
    load_s = busy_s + np.bincount(encoder[others], seconds[others], len(speeds)) / speeds
    for image in split.tolist():
        parts = images.parts(image)
        if images.ring[parts.start] < 0:
            _spread(encoder, load_s, seconds, speeds, parts)
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
