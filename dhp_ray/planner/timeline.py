"""When each group of a plan runs.

sync=step          a group starts when the last of its ranks is free      rank 0  |--a--|---c----|
                                                                         rank 1  |--a--|-b-|
                   after the images are encoded, where that is apart from the packs (encoder_timeline.py)
sync=micro_batch   all groups of a micro-batch start together            rank 0  |--a--|...|--c--|
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.encoder_timeline import EncodedImages, EncoderTimeline, encoder_timeline
from dhp_ray.planner.plan import GroupPlan, Plan
from dhp_ray.planner.primitives.list_schedule import list_schedule
from dhp_ray.planner.problem import Problem, problem_of
from dhp_ray.planner.schedule import firsts_of, flat


def starts_of(groups: Sequence[GroupPlan], num_ranks: int, sync: str, fixed_s: float) -> tuple[list[float], float]:
    """Start of every group, and the time of the whole step, with fixed costs (paid before the packs that they belong
    to)."""
    if sync == "micro_batch":
        return _micro_batches(groups, fixed_s)
    ranks, degrees = flat([group.ranks for group in groups])
    times = np.array([group.predicted_time_s for group in groups])
    starts, ends = list_schedule(ranks, firsts_of(degrees), times, num_ranks)
    return (starts + fixed_s).tolist(), float(ends.max() + fixed_s)


def _micro_batches(groups: Sequence[GroupPlan], fixed_s: float) -> tuple[list[float], float]:
    slowest: dict[int, float] = {}
    for group in groups:
        slowest[group.micro_batch] = max(slowest.get(group.micro_batch, 0.0), group.predicted_time_s)
    begin, time = {}, 0.0
    for micro_batch in sorted(slowest):
        time += fixed_s
        begin[micro_batch] = time
        time += slowest[micro_batch]
    return [begin[group.micro_batch] for group in groups], time


def fixed_starts(plan: Plan) -> list[float]:
    """When each stretch of `plan.fixed_s` begins, on all ranks: before the first pack, or before each micro-batch."""
    if plan.sync != "micro_batch":
        return [0.0]
    starts, _ = _micro_batches(plan.groups, plan.fixed_s)
    return [start - plan.fixed_s for start in sorted(set(starts))]


def plan_starts(plan: Plan) -> tuple[list[float], float]:
    """Start of every group of a plan, and the time of the whole step."""
    apart = apart_timeline(plan)
    if apart is None:
        starts, end_s = starts_of(plan.groups, plan.cluster.num_ranks, plan.sync, plan.fixed_s)
        return starts, end_s + plan.update_s
    return (apart.starts_s + plan.fixed_s).tolist(), apart.makespan_s + plan.fixed_s


def apart_timeline(plan: Plan) -> EncoderTimeline | None:
    """When ranks encode, and all that follows, without `plan.fixed_s`; None where packs encode their own images."""
    if not plan.vision.apart:
        return None
    problem = problem_of(plan.samples, plan.cluster, CostModel.from_json(plan.inputs["cost"]), plan.sync)
    return timeline_apart(plan, problem, np.array([group.predicted_time_s for group in plan.groups]))


def timeline_apart(plan: Plan, problem: Problem, times_s: np.ndarray) -> EncoderTimeline:
    """The same for groups that take so long, under the costs and on the ranks of `problem`."""
    encoder, group_of = np.zeros((2, len(problem.all_image_s)), dtype=np.int64)
    for index, group in enumerate(plan.groups):
        first = 0
        for row in group.pack.sequences:
            begin, end = problem.first_image[row : row + 2]
            encoder[begin:end], group_of[begin:end] = group.encoders[first : first + end - begin], index
            first += end - begin
    ranks, degrees = flat([group.ranks for group in plan.groups])
    images = EncodedImages(problem.all_image_s, problem.all_image_patches, problem.all_image_rows, encoder, group_of)
    return encoder_timeline(images, ranks, firsts_of(degrees), times_s, problem.speeds,
                            problem.cost, plan.vision.keeps)


def idle_fraction(plan: Plan) -> float:
    """Share of a plan's rank-time in which a rank has nothing to do: no pack, no images to encode, nor what it pays
    once (`plan.fixed_s`)."""
    busy = sum(group.predicted_time_s * group.degree for group in plan.groups)
    if apart := apart_timeline(plan):
        busy += float((apart.encoded_s + apart.end_s - apart.backward_s).sum())
    fixed_s = (plan.fixed_s * len(fixed_starts(plan)) + plan.update_s) * plan.cluster.num_ranks
    return 1.0 - (busy + fixed_s) / (plan.predicted_time_s * plan.cluster.num_ranks)
