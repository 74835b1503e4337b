"""When each group of a plan runs.

sync=step          a group starts when the last of its ranks is free      rank 0  |--a--|---c----|
                                                                         rank 1  |--a--|-b-|
sync=micro_batch   all groups of a micro-batch start together            rank 0  |--a--|...|--c--|
                   as soon as that before is over (`pricing.micro_batches_s`)
both               after the images are encoded, if that is apart from the packs (encoder_timeline.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.encoded_images import encoded_images
from dhp_ray.planner.encoder_timeline import EncoderTimeline, Packs, timeline_of
from dhp_ray.planner.plan import GroupPlan, Plan
from dhp_ray.planner.pricing import PackTimes, micro_batches_s
from dhp_ray.planner.primitives.list_schedule import list_schedule
from dhp_ray.planner.problem import Problem, problem_of
from dhp_ray.planner.schedule import firsts_of, flat, gathered
from dhp_ray.planner.vision_plan import encoding_ranks


def starts_of(groups: Sequence[GroupPlan], num_ranks: int, sync: str, fixed_s: float) -> tuple[list[float], float]:
    """Start of every group, and the time of the whole step, including fixed costs (which come before the packs that
    they belong to).
    """
    if sync == "micro_batch":
        return _micro_batches(groups, fixed_s)
    ranks, degrees = flat([group.ranks for group in groups])
    times = np.array([group.predicted_time_s for group in groups])
    starts, ends = list_schedule(ranks, firsts_of(degrees), times, num_ranks)
    return (starts + fixed_s).tolist(), float(ends.max() + fixed_s)


def _micro_batches(groups: Sequence[GroupPlan], fixed_s: float) -> tuple[list[float], float]:
    numbers = np.array([group.micro_batch for group in groups])
    begin, time = {}, 0.0
    for number, seconds in zip(np.unique(numbers).tolist(), micro_batches_s(numbers, PackTimes.of(groups)).tolist()):
        time += fixed_s
        begin[number] = time
        time += seconds
    return [begin[group.micro_batch] for group in groups], time


def fixed_starts(plan: Plan) -> list[float]:
    """When each period of `plan.fixed_s` begins, on all ranks: before the first pack, or before each micro-batch."""
    if plan.sync != "micro_batch":
        return [0.0]
    starts = dict(zip([group.micro_batch for group in plan.groups], plan_starts(plan)[0]))
    return [0.0, *(starts[number] - plan.fixed_s for number in sorted(starts)[1:])]


def plan_starts(plan: Plan) -> tuple[list[float], float]:
    """Start of every group of a plan, and the time of the whole step."""
    apart = apart_timeline(plan)
    if apart is None:
        starts, end_s = starts_of(plan.groups, plan.cluster.num_ranks, plan.sync, plan.fixed_s)
        return starts, end_s + plan.update_s
    return (apart.starts_s + plan.fixed_s).tolist(), apart.makespan_s + plan.fixed_s + plan.update_s


def apart_timeline(plan: Plan) -> EncoderTimeline | None:
    """The timeline of encoding and of everything after it, counted from the end of `plan.fixed_s`; None if packs encode
    their own images.
    """
    if not plan.vision.apart:
        return None
    problem = problem_of(plan.samples, plan.cluster, CostModel.from_json(plan.inputs["cost"]), plan.sync,
                         deals_images=False)
    return timeline_apart(plan, problem, np.array([group.predicted_time_s for group in plan.groups]))


def timeline_apart(plan: Plan, problem: Problem, times_s: np.ndarray) -> EncoderTimeline:
    """The same for groups that take `times_s`, with the costs and the ranks of `problem`."""
    rows, pieces = flat([group.pack.sequences for group in plan.groups])
    group_of_row = np.empty(len(rows), dtype=np.int64)
    group_of_row[rows] = np.repeat(np.arange(len(pieces)), pieces)
    numbers = gathered(np.arange(len(problem.all_image_s)), problem.first_image, rows)[0].tolist()  # in plan order
    on_ranks, in_passes, splits = list[tuple[int, ...]](), list[tuple[int, ...]](), dict[int, int]()
    for group in plan.groups:
        splits |= {numbers[len(on_ranks) + split.image]: len(split.ranks) for split in group.splits}
        on_ranks += encoding_ranks(group.encoders, group.splits)
        if group.passes:
            in_passes += encoding_ranks(group.passes, [replace(split, ranks=split.passes) for split in group.splits])
    in_order = np.argsort(numbers)
    images = encoded_images(problem, group_of_row, splits)
    images = images.on_ranks(flat([on_ranks[place] for place in in_order])[0])
    passes = flat([in_passes[place] for place in in_order])[0] if plan.vision.num_passes else None
    ranks, degrees = flat([group.ranks for group in plan.groups])
    packs = Packs(ranks, firsts_of(degrees), times_s, np.array([group.micro_batch for group in plan.groups]))
    return timeline_of(images, passes, packs, problem.speeds, problem.cost, plan.vision.keeps)


def idle_fraction(plan: Plan) -> float:
    """Share of a plan's rank-time in which a rank has nothing to do: no pack, no images to encode, and no fixed costs
    (`plan.fixed_s`).
    """
    busy = sum(group.predicted_time_s * group.degree for group in plan.groups)
    if apart := apart_timeline(plan):
        busy += float((apart.forward_busy_s + apart.backward_busy_s).sum())
    fixed_s = (plan.fixed_s * len(fixed_starts(plan)) + plan.update_s) * plan.cluster.num_ranks
    return 1.0 - (busy + fixed_s) / (plan.predicted_time_s * plan.cluster.num_ranks)
