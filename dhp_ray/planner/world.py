"""Plans that encode a batch's images apart from the packs, on any rank: packs are planned as if images were there
already, then images are balanced over the ranks (`world_encoder`).

    problem -> without_images -> a planner of PLANNERS -> schedule of packs -> world_of -> who encodes what, makespan
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.encoder_memory import world_within_memory
from dhp_ray.planner.encoder_timeline import EncodedImages, Packs, timeline_of
from dhp_ray.planner.lockstep_passes import lockstep_passes
from dhp_ray.planner.plan import VisionPlan
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.world_encoder import balanced_encoders


class World(NamedTuple):
    """`encoder`: the rank of each image of the batch, in order; `passes`: its pass there, with sync=micro_batch."""

    vision: VisionPlan
    encoder: np.ndarray
    passes: np.ndarray | None
    makespan_s: float


def without_images(problem: Problem) -> Problem:
    """The batch without what its images cost."""
    items = problem.items.copy()  # type: ignore[attr-defined]
    items.vision_s = items.image_s = 0.0
    return replace(problem, items=items, all_image_s=np.zeros_like(problem.all_image_s))


def world_of(problem: Problem, schedule: Schedule, times: np.ndarray) -> World | None:
    """Who encodes the images of a batch whose packs run by this schedule, each for `times` seconds; None where the
    ranks have no memory for that. Without vision costs images are dealt out by their patches."""
    images = _images(problem, schedule)
    vision = world_within_memory(problem, schedule, images)
    if vision is None:
        return None
    packs, passes = Packs(schedule.ranks, schedule.first_rank, times, schedule.micro_batch), None
    if problem.sync == "micro_batch":
        kept = vision.keeps and problem.cost.vision_forward < 1.0  # then memory holds all of them in one pass
        passes = lockstep_passes(images.seconds if images.seconds.any() else images.patches, images.patches,
                                 images.encoder, len(problem.speeds), 0 if kept else vision.pass_patches)
        vision = replace(vision, num_passes=int(passes.max()) + 1)
    timeline = timeline_of(images, passes, packs, problem.speeds, problem.cost, vision.keeps)
    return World(vision, images.encoder, passes, problem.cost.fixed_s + timeline.makespan_s)


def _images(problem: Problem, schedule: Schedule) -> EncodedImages:
    group_of_row = np.empty(len(problem.samples), dtype=np.int64)
    group_of_row[schedule.rows] = np.repeat(np.arange(len(schedule.first_row) - 1), np.diff(schedule.first_row))
    row = np.repeat(np.arange(len(problem.samples)), np.diff(problem.first_image))
    group, costs = group_of_row[row], problem.all_image_s.any()
    encoder = balanced_encoders(problem.all_image_s if costs else problem.all_image_patches, group, schedule.ranks,
                                schedule.first_rank, problem.speeds if costs else np.ones(len(problem.speeds)))
    return EncodedImages(problem.all_image_s, problem.all_image_patches, problem.all_image_rows, encoder, group)
