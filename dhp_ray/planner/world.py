"""Plans that encode a batch's images apart from the packs, on any rank: packs are planned as if images were encoded
already, then images are balanced over the ranks (`world_encoder`).

    problem -> without_images -> a planner of PLANNERS -> schedule of packs -> world_of -> who encodes what, makespan
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.encoded_images import EncodedImages, encoded_images, grid_of
from dhp_ray.planner.encoder_memory import Room, room_for_images, within_room
from dhp_ray.planner.encoder_timeline import Packs, timeline_of
from dhp_ray.planner.image_ranks import one_part_more, ranks_of_images, with_one_more
from dhp_ray.planner.lockstep_passes import lockstep_passes
from dhp_ray.planner.plan import VisionPlan
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.split_images import parts_for_memory, parts_for_time
from dhp_ray.planner.world_encoder import FAR

CUTS, FEW = 4, 32
"""The most additional parts that are tried, one at a time, after `parts_for_time`. Before that, if there are at most
FEW images, each of them is tried with one part more as long as ranks are uneven: halves of a small image may fill what
others leave.
"""


class World(NamedTuple):
    """`images` with the ranks that encode them. `passes`: the pass of each on its rank, with sync=micro_batch.
    `busy_s`: how long each rank encodes.
    """

    vision: VisionPlan
    images: EncodedImages
    passes: np.ndarray | None
    busy_s: np.ndarray
    makespan_s: float


def without_images(problem: Problem) -> Problem:
    """The batch without the costs of its images."""
    items = problem.items.copy()  # type: ignore[attr-defined]
    items.vision_s = items.image_s = items.fullest_s = 0.0
    items.host_s = problem.cost.host_s(items.tokens.astype(np.float64))
    return replace(problem, items=items, all_image_s=np.zeros_like(problem.all_image_s))


def world_of(problem: Problem, schedule: Schedule, times: np.ndarray) -> World | None:
    """The encoders of a batch's images if its packs run by this schedule, each for `times` seconds; None if the ranks
    have no memory for that. Without vision costs images are dealt out by their patches.

    Images are in parts (`split_images`) if memory requires it, and in more parts if that makes the step shorter: images
    that alone take longer than the mean of all ranks; any one if they are few; and then, one part after another, those
    that hold up the fullest rank.
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

    def at(num_parts: np.ndarray) -> World | None:
        images = encoded_images(problem, group_of_row, num_parts)
        return _world(problem, schedule, times, images.on_ranks(ranks_of_images(problem, schedule, images)), room)

    best = at(least)
    if not cost.cuts_images:
        return best
    more = parts_for_time(lambda image: grid_of(problem, image), problem.all_image_s, least, problem.speeds)
    if (more > least).any():
        best = _shortest([best, at(more)])
    if best and len(least) <= FEW and _is_uneven(problem, best):
        num_parts = np.diff(best.images.first)
        for image in range(len(least)):
            further = with_one_more(problem, num_parts, image)
            if further is not None and best and _is_uneven(problem, best):
                best = _shortest([best, at(further)])
    newest = best
    for _ in range(CUTS):  # also after a cut without gain: if two images hold up two ranks, both must be cut
        further = one_part_more(problem, newest.images) if newest and _is_uneven(problem, newest) else None
        if further is None:
            break
        newest = at(further)
        best = _shortest([best, newest])
    return best


def _shortest(worlds: Sequence[World | None]) -> World | None:
    """The shortest; the first if several are equal."""
    return min(filter(None, worlds), key=lambda world: world.makespan_s, default=None)


def _is_uneven(problem: Problem, world: World) -> bool:
    """Whether images keep the step from being shorter: the fullest rank encodes longer than the mean."""
    return (world.makespan_s > problem.lower_bound_s * (1 + FAR)
            and world.busy_s.max() > float((world.busy_s * problem.speeds).sum() / problem.speeds.sum()) * (1 + FAR))


def _world(
    problem: Problem, schedule: Schedule, times: np.ndarray, images: EncodedImages, room: Room
) -> World | None:
    """The images on these ranks, if memory allows."""
    vision, passes, num_ranks = within_room(images, room, problem.cost), None, problem.cluster.num_ranks
    if vision is None:
        return None
    if problem.sync == "micro_batch":
        kept = vision.keeps and problem.cost.vision_forward < 1.0  # then memory holds all of them in one pass
        seconds = images.seconds / problem.speeds[images.encoder] if images.seconds.any() else images.patches
        passes = lockstep_passes(seconds, images.patches, images.encoder, num_ranks, 0 if kept else vision.pass_patches)
        vision = replace(vision, num_passes=int(passes.max()) + 1)
    packs = Packs(schedule.ranks, schedule.first_rank, times, schedule.micro_batch)
    timeline = timeline_of(images, passes, packs, problem.speeds, problem.cost, vision.keeps)
    return World(vision, images, passes, timeline.forward_busy_s + timeline.backward_busy_s,
                 problem.cost.fixed_s + timeline.makespan_s)
