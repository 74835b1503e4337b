"""Plans that encode a batch's images apart from the packs, on any rank: packs are planned as if images were there
already, then images are balanced over the ranks (`world_encoder`).

    problem -> without_images -> a planner of PLANNERS -> schedule of packs -> world_of -> who encodes what, makespan
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.encoded_images import EncodedImages, encoded_images, grid_of
from dhp_ray.planner.encoder_memory import Room, room_for_images, within_room
from dhp_ray.planner.encoder_timeline import Packs, timeline_of
from dhp_ray.planner.lockstep_passes import lockstep_passes
from dhp_ray.planner.plan import VisionPlan
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.split_images import parts_for_memory, parts_for_time
from dhp_ray.planner.world_encoder import balanced_encoders


class World(NamedTuple):
    """`images` with the ranks that encode them; `passes`: in which of its rank's each is, with sync=micro_batch.
    `making_s`: to make the process groups of images in parts that there are not yet."""

    vision: VisionPlan
    images: EncodedImages
    passes: np.ndarray | None
    makespan_s: float
    making_s: float = 0.0


def without_images(problem: Problem) -> Problem:
    """The batch without what its images cost."""
    items = problem.items.copy()  # type: ignore[attr-defined]
    items.vision_s = items.image_s = 0.0
    items.host_s = problem.cost.host_s(items.tokens.astype(np.float64))
    return replace(problem, items=items, all_image_s=np.zeros_like(problem.all_image_s))


def world_of(problem: Problem, schedule: Schedule, times: np.ndarray) -> World | None:
    """Who encodes the images of a batch whose packs run by this schedule, each for `times` seconds; None where the
    ranks have no memory for that. Without vision costs images are dealt out by their patches.

    Images are split where memory asks for it, and further where that makes the step shorter.
    """
    group_of_row = np.empty(len(problem.samples), dtype=np.int64)
    group_of_row[schedule.rows] = np.repeat(np.arange(len(schedule.first_row) - 1), np.diff(schedule.first_row))
    room = room_for_images(problem, schedule, group_of_row)
    if room is None:
        return None
    num_ranks, cost = problem.cluster.num_ranks, problem.cost
    least = parts_for_memory(lambda image: grid_of(problem, image), problem.all_image_patches, float(room.alone.min()),
                             num_ranks, cost)
    if least is None:
        return None
    more = parts_for_time(lambda image: grid_of(problem, image), problem.all_image_s, least, problem.speeds, cost)
    found = []
    for num_parts in [least] + [more] * bool((more > least).any()):
        images = encoded_images(problem, schedule.rows, group_of_row, num_parts)
        images = images.on_ranks(_encoders(problem, schedule, images))
        found += _world(problem, schedule, times, images, room)
    return min(found, key=lambda world: world.makespan_s + world.making_s, default=None)


def _world(
    problem: Problem, schedule: Schedule, times: np.ndarray, images: EncodedImages, room: Room
) -> list[World]:
    """The images on these ranks, where memory allows."""
    vision, passes, num_ranks = within_room(images, room, problem.cost), None, problem.cluster.num_ranks
    if vision is None:
        return []
    if problem.sync == "micro_batch":
        kept = vision.keeps and problem.cost.vision_forward < 1.0  # then memory holds all of them in one pass
        seconds = images.seconds / problem.speeds[images.encoder] if images.seconds.any() else images.patches
        passes = lockstep_passes(seconds, images.patches, images.encoder, images.ring, num_ranks,
                                 0 if kept else vision.pass_patches)
        vision = replace(vision, num_passes=int(passes.max()) + 1)
    packs = Packs(schedule.ranks, schedule.first_rank, times, schedule.micro_batch)
    timeline = timeline_of(images, passes, packs, problem.speeds, problem.cost, vision.keeps)
    return [World(vision, images, passes, problem.cost.fixed_s + timeline.makespan_s,
                  _making_s(problem, schedule, images))]


def _encoders(problem: Problem, schedule: Schedule, images: EncodedImages) -> np.ndarray:
    """The rank of each image or part, balanced; those of one image are different, and those that exchange ascend."""
    costs = problem.all_image_s.any()
    seconds, speeds = (images.seconds, problem.speeds) if costs else (images.patches, np.ones(len(problem.speeds)))
    encoder = balanced_encoders(seconds, images.group, schedule.ranks, schedule.first_rank, speeds)
    load_s = np.bincount(encoder, seconds, len(speeds)) / speeds
    for image in images.split().tolist():
        parts = images.parts(image)
        taken = set[int]()
        for part in range(parts.start, parts.stop):
            rank = int(encoder[part])
            if rank in taken:  # to the rank that ends first with it, of those that have no part yet
                load_s[rank] -= seconds[part] / speeds[rank]
                ends_s = load_s + seconds[part] / speeds
                ends_s[list(taken)] = np.inf
                rank = encoder[part] = int(ends_s.argmin())
                load_s[rank] = ends_s[rank]
            taken.add(rank)
        if images.ring[parts.start] >= 0:
            encoder[parts].sort()
    return encoder


def _making_s(problem: Problem, schedule: Schedule, images: EncodedImages) -> float:
    """Seconds of the rank that makes most of the groups of images in parts that exchange, beyond those of the pool and
    of the packs."""
    if problem.cost.group_s == 0.0 or not (images.ring >= 0).any():
        return 0.0
    packs = np.split(schedule.ranks, schedule.first_rank[1:-1])
    known = {tuple(sorted(ranks)) for ranks in (*problem.pool, *(of_pack.tolist() for of_pack in packs))}
    rings = {tuple(images.encoder[images.ring == ring].tolist()) for ring in range(int(images.ring.max()) + 1)}
    made = [rank for ranks in rings - known for rank in ranks]
    return problem.cost.group_s * float(np.bincount(made).max()) if made else 0.0
