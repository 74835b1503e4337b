"""Seconds of each group of a schedule or a plan, and when it runs.

sync=step          a group starts when the last of its ranks is free      rank 0  |--a--|---c----|
                                                                         rank 1  |--a--|-b-|
sync=micro_batch   all groups of a micro-batch start together            rank 0  |--a--|...|--c--|
                   as soon as that before is over (`micro_batches_s`)
both               after the images are encoded, if that is apart from the packs (`EncoderTimeline`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.rates import encoding_s, running_s
from dhp_ray.planner.encoder.images import EncodedImages, encoded_images
from dhp_ray.planner.encoder.members import encoders_of
from dhp_ray.planner.plan.types import Pack, Plan, SplitImage, encoding_ranks
from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.primitives.list_schedule import list_schedule, list_schedule_from
from dhp_ray.planner.problem import Problem, problem_of
from dhp_ray.planner.schedule import Ranks, Schedule, crosses_nodes, firsts_of, flat, gathered


class PackTimes(NamedTuple):
    """By group: its seconds; those in which its busiest member encodes images; and all others that it computes or
    waits for its own members. A pack may take longer than both together, for its layers' parameters (`least_s`).
    """

    pack_s: np.ndarray
    encode_s: np.ndarray
    rest_s: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[Pack]) -> PackTimes:
        """Those of a plan."""
        return cls(*(np.array([getattr(group, name) for group in groups], dtype=np.float64)
                     for name in ("predicted_time_s", "encode_s", "rest_s")))


def times_of(problem: Problem, schedule: Schedule) -> PackTimes:
    items, first_rank, degree = problem.items, schedule.first_rank[:-1], np.diff(schedule.first_rank)
    rates: Any = problem.machine.rates[degree]
    speed = np.minimum.reduceat(problem.speeds[schedule.ranks], first_rank)
    tokens, language, attention, host = (
        np.add.reduceat(array[schedule.rows], schedule.first_row[:-1])
        for array in (items.tokens, items.language_s, items.attention_s, items.host_s)
    )
    crosses = crosses_nodes(schedule, np.array(problem.cluster.nodes))
    transfer_s = np.where(crosses, rates.across_s, rates.inside_s)
    encode_s = _encoders(problem, schedule)[2] if problem.all_image_s.any() else np.zeros(len(degree))
    encode_s = encode_s + rates.encoder_pass_s * (encode_s > 0) / speed
    seconds = running_s(language, attention, encode_s, host, tokens, degree, speed, transfer_s, rates)
    encode_s = encoding_s(encode_s, tokens, rates)
    return PackTimes(np.maximum(rates.least_s, seconds), encode_s, seconds - encode_s)


def makespan_of(problem: Problem, schedule: Schedule, times: PackTimes) -> float:
    """Seconds of the whole step, including fixed costs (`timeline`)."""
    fixed_s = problem.cost.fixed_s
    if problem.sync == "micro_batch":
        seconds = micro_batches_s(schedule.micro_batch, times)
        return float(seconds.sum() + fixed_s * len(seconds))
    return fixed_s + float(
        list_schedule(schedule.ranks, schedule.first_rank, times.pack_s, problem.cluster.num_ranks)[1].max()
    )


def micro_batches_s(micro_batch: np.ndarray, times: PackTimes) -> np.ndarray:
    """Seconds of each micro-batch, in the order of their numbers. `micro_batch`: that of each group.

    Ranks meet at every layer, whose parameters are gathered from all of them. So the encoder's layers take as long as
    on the rank that encodes longest, and after them all others as long as on the rank that takes longest for the rest
    of its pack:

        rank 0   encodes 3 s    | rest 1 s ...      a micro-batch of 3 + 4 s; each pack alone takes 4 s
        rank 1   .............. | rest 4 s
    """
    numbers, place = np.unique(micro_batch, return_inverse=True)
    pack_s, encode_s, rest_s = longest = np.zeros((3, len(numbers)))
    for of_micro_batch, of_packs in zip(longest, times):
        np.maximum.at(of_micro_batch, place, of_packs)
    return np.maximum(pack_s, encode_s + rest_s)


def time_of(problem: Problem, schedule: Schedule) -> float:
    """Seconds of the whole step under a schedule."""
    return makespan_of(problem, schedule, times_of(problem, schedule))


def new_groups(problem: Problem, schedule: Schedule) -> list[Ranks]:
    """The process groups of a schedule that are not in the pool."""
    ranks, first, pool = schedule.ranks.tolist(), schedule.first_rank.tolist(), set(problem.pool)
    groups = dict.fromkeys(tuple(ranks[begin:end]) for begin, end in pairwise(first) if end - begin > 1)
    return [group for group in groups if group not in pool]


def group_creation_s(problem: Problem, schedule: Schedule) -> float:
    """Seconds until every rank has made the process groups of a schedule that are not in the pool, in the schedule's
    order; the ranks of a group make it together.
    """
    if problem.cost.group_s == 0.0:
        return 0.0
    made = new_groups(problem, schedule)
    members, degrees = flat(made)
    times = np.full(len(made), problem.cost.group_s)
    return float(list_schedule(members, firsts_of(degrees), times, problem.cluster.num_ranks)[1].max())


def groups_of(
    problem: Problem, schedule: Schedule, times: PackTimes, images: EncodedImages | None = None,
    passes: np.ndarray | None = None,
) -> tuple[Pack, ...]:
    """The groups of a plan. `images`: with the ranks that encode them, if that is apart from the packs. `passes`: the
    pass of each on its rank, with sync=micro_batch. Without vision costs images are dealt out by their patches.
    """
    tokens = np.add.reduceat(problem.items.tokens[schedule.rows], schedule.first_row[:-1])
    tokens = tokens / np.diff(schedule.first_rank)
    # beyond that, activations are moved, or layers recomputed, so that it fits
    memory = problem.cost.resident(problem.sync) + problem.cost.memory_bytes_per_token * np.minimum(
        tokens, problem.cluster.tokens_per_rank)
    offload, recomputed = (share.share_of(tokens) for share in (problem.cluster.offload, problem.cluster.recomputation))
    rows, ranks = schedule.rows.tolist(), schedule.ranks.tolist()
    row, rank = schedule.first_row.tolist(), schedule.first_rank.tolist()
    encoders, in_pass, image, splits = [], [], [0] * len(row), dict[int, list[SplitImage]]()
    if images is not None:
        begin = images.first[:-1]
        by_row, first = gathered(images.encoder[begin], problem.first_image, schedule.rows)
        encoders, image = by_row.tolist(), first[schedule.first_row].tolist()
        if passes is not None:
            in_pass = gathered(passes[begin], problem.first_image, schedule.rows)[0].tolist()
        splits = _splits(problem, schedule, images, passes, image)
    elif len(problem.all_image_s):
        encoders, image = (array.tolist() for array in _encoders(problem, schedule)[:2])
    return tuple(
        [
            Pack(
                tuple(ranks[rank[group] : rank[group + 1]]),
                tuple(rows[row[group] : row[group + 1]]),
                seconds,
                bytes_,
                micro_batch,
                tuple(encoders[image[group] : image[group + 1]]),
                tuple(in_pass[image[group] : image[group + 1]]),
                tuple(splits.get(group, ())),
                moved,
                again,
                encode_s,
                rest_s,
            )
            for group, (seconds, encode_s, rest_s, bytes_, micro_batch, moved, again) in enumerate(
                zip(*(array.tolist() for array in times), memory.tolist(), schedule.micro_batch.tolist(),
                    offload.tolist(), recomputed.tolist())
            )
        ]
    )


def _splits(
    problem: Problem, schedule: Schedule, images: EncodedImages, passes: np.ndarray | None, first_image: list[int]
) -> dict[int, list[SplitImage]]:
    """Split images of each group that has some, in the order of its images; those of group g begin with
    `first_image[g]` in plan order.
    """
    split, found = images.split(), dict[int, list[SplitImage]]()
    if len(split):
        place = np.empty(len(problem.all_image_s), dtype=np.int64)
        place[gathered(np.arange(len(place)), problem.first_image, schedule.rows)[0]] = np.arange(len(place))
        for number in sorted(split.tolist(), key=lambda number: int(place[number])):
            parts = images.parts(number)
            group = int(images.group[parts.start])
            found.setdefault(group, []).append(SplitImage(
                int(place[number]) - first_image[group], tuple(images.encoder[parts].tolist()),
                () if passes is None else tuple(passes[parts].tolist())))
    return found


def _encoders(problem: Problem, schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    costs = problem.all_image_s.any()
    return encoders_of(
        schedule,
        problem.first_image,
        problem.all_image_s if costs else problem.all_image_patches,
        problem.all_image_patches,
        problem.speeds if costs else np.ones(problem.cluster.num_ranks),
    )


class EncoderTimeline(NamedTuple):
    """When ranks encode, run packs and run the encoder's backward pass, if images are encoded apart from the packs.

        rank 0  encode i0, i1 | features | pack a ............ | gradients | backward of i0, i1
        rank 1  encode i2     | features | pack b ... | pack c | gradients | backward of i2

    A rank begins its packs once every rank that it exchanges features with has encoded, and the rows have arrived. It
    begins the backward pass once every rank that it exchanges gradients with has run its packs. Two ranks exchange if
    one encodes an image of a pack that the other runs. There is no barrier of all ranks.

    With sync=micro_batch every phase is such a barrier: all ranks run the same number of encoder passes, in lockstep,
    and each pass, exchange and micro-batch ends with the rank that takes longest.

        rank 0  pass 0 .. | pass 1 ... | features | pack a ........ | pack c ... | gradients | backward of both passes
        rank 1  pass 0 .. | pass 1 .   | features | pack b ...      | pack d ... | gradients | backward of both passes

    Seconds since the step began. The `fixed_s` that all ranks pay at the start is not included; the `fixed_s` of
    later micro-batches is.

    By rank: `encoded_s`, the end of the first phase; `ready_s`, the arrival of the features; `ended_s`, the end of its
    packs; `backward_s`, the begin of the second phase; `end_s`; and the time in which the rank itself encodes in each
    phase, `forward_busy_s` and `backward_busy_s`. By group: `starts_s`.
    """

    encoded_s: np.ndarray
    ready_s: np.ndarray
    starts_s: np.ndarray
    ended_s: np.ndarray
    backward_s: np.ndarray
    end_s: np.ndarray
    forward_busy_s: np.ndarray
    backward_busy_s: np.ndarray

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max())


def timeline_of(
    problem: Problem, schedule: Schedule, times_s: np.ndarray, images: EncodedImages, passes: np.ndarray | None,
    keeps: bool,
) -> EncoderTimeline:
    """The timeline of groups that take `times_s` without their images. `passes`: the pass of each image on its rank,
    with sync=micro_batch. `keeps`: `VisionPlan.keeps`.
    """
    cost, speeds = problem.cost, problem.speeds
    forward = cost.vision_forward
    backward = 0.0 if forward == 1.0 else 1.0 - forward + (0.0 if keeps else forward)  # 0: nothing of it is trained
    rows = _most_rows(images.rows, images.encoder, images.group, schedule.ranks, schedule.first_rank, len(speeds))
    exchange_s = cost.feature_bytes / cost.slowest_bytes_per_s * rows
    if passes is not None:
        return _in_lockstep(problem, schedule, times_s, images, passes, forward, backward, float(exchange_s.max()))
    busy_s = np.bincount(images.encoder, images.seconds / speeds[images.encoder], len(speeds))
    busy_s = busy_s + cost.encoder_pass_s * (busy_s > 0) / speeds
    encoded_s = forward * busy_s
    groups = (images.encoder, images.group, schedule.ranks, schedule.first_rank)
    ready_s = _meeting(*groups, encoded_s) + exchange_s
    starts_s, ended_s = list_schedule_from(ready_s, schedule.ranks, schedule.first_rank, times_s)
    begin_s = end_s = ended_s
    if backward:
        begin_s = _meeting(*groups, ended_s) + exchange_s
        end_s = begin_s + backward * busy_s
    return EncoderTimeline(encoded_s, ready_s, starts_s, ended_s, begin_s, end_s, forward * busy_s, backward * busy_s)


def _in_lockstep(
    problem: Problem, schedule: Schedule, times_s: np.ndarray, images: EncodedImages, passes: np.ndarray,
    forward: float, backward: float, exchange_s: float,
) -> EncoderTimeline:
    """A pass takes as long as its images on the slowest rank, and at least as long as gathering the encoder's
    parameters and reducing its gradients.
    """
    cost, speeds = problem.cost, problem.speeds
    num_ranks, num_passes = len(speeds), int(passes.max()) + 1
    seconds = np.bincount(images.encoder * num_passes + passes, images.seconds, num_ranks * num_passes)
    busy_s = seconds.reshape(num_ranks, num_passes)
    busy_s = (busy_s + cost.encoder_pass_s * (busy_s > 0)) / speeds[:, None]
    passes_s = float(np.maximum(busy_s.max(axis=0), cost.encoder_gather_s).sum())
    slowest_s = np.zeros(int(schedule.micro_batch.max()) + 1)
    np.maximum.at(slowest_s, schedule.micro_batch, times_s)
    numbers = np.unique(schedule.micro_batch)  # `fixed_s` counts only for micro-batches with packs
    begins_s = np.zeros(len(slowest_s))
    begins_s[numbers] = np.cumsum(slowest_s[numbers] + cost.fixed_s) - slowest_s[numbers] - cost.fixed_s
    ready_s = forward * passes_s + exchange_s
    ended_s = ready_s + float(slowest_s.sum()) + cost.fixed_s * (len(numbers) - 1)
    begin_s = ended_s + exchange_s * (backward > 0)
    encoded_s, ready_all_s, ended_all_s, begin_all_s, end_s = (
        np.full(num_ranks, at_s)
        for at_s in (forward * passes_s, ready_s, ended_s, begin_s, begin_s + backward * passes_s))
    return EncoderTimeline(encoded_s, ready_all_s, ready_s + begins_s[schedule.micro_batch], ended_all_s, begin_all_s,
                           end_s, forward * busy_s.sum(axis=1), backward * busy_s.sum(axis=1))


@compiled
def _meeting(
    encoder: np.ndarray, group: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray, free_s: np.ndarray
) -> np.ndarray:
    """When each rank and all ranks that it exchanges with are free."""
    meeting_s = free_s.copy()
    for image in range(len(encoder)):
        mine = encoder[image]
        for rank in ranks[first_rank[group[image]] : first_rank[group[image] + 1]]:
            meeting_s[rank] = max(meeting_s[rank], free_s[mine])
            meeting_s[mine] = max(meeting_s[mine], free_s[rank])
    return meeting_s


@compiled
def _most_rows(
    rows: np.ndarray, encoder: np.ndarray, group: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray, num_ranks: int
) -> np.ndarray:
    """The rows that each rank sends or receives. The ranks of a group have equal shares of an image's rows."""
    sent, received = np.zeros(num_ranks), np.zeros(num_ranks)
    for image in range(len(encoder)):
        members = ranks[first_rank[group[image]] : first_rank[group[image] + 1]]
        for rank in members:
            if rank != encoder[image]:
                sent[encoder[image]] += rows[image] / len(members)
                received[rank] += rows[image] / len(members)
    return np.maximum(sent, received)


def starts_of(groups: Sequence[Pack], num_ranks: int, sync: str, fixed_s: float) -> tuple[list[float], float]:
    """Start of every group, and the time of the whole step, including fixed costs (which come before the packs that
    they belong to).
    """
    if sync == "micro_batch":
        numbers = np.array([group.micro_batch for group in groups])
        begin, time = {}, 0.0
        for number, seconds in zip(np.unique(numbers).tolist(),
                                   micro_batches_s(numbers, PackTimes.of(groups)).tolist()):
            time += fixed_s
            begin[number] = time
            time += seconds
        return [begin[group.micro_batch] for group in groups], time
    ranks, degrees = flat([group.ranks for group in groups])
    times = np.array([group.predicted_time_s for group in groups])
    starts, ends = list_schedule(ranks, firsts_of(degrees), times, num_ranks)
    return (starts + fixed_s).tolist(), float(ends.max() + fixed_s)


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


def schedule_of(plan: Plan) -> Schedule:
    rows, num_rows = flat([group.sequences for group in plan.groups])
    ranks, degrees = flat([group.ranks for group in plan.groups])
    micro_batch = np.array([group.micro_batch for group in plan.groups], dtype=np.int64)
    return Schedule(rows, firsts_of(num_rows), ranks, firsts_of(degrees), micro_batch)


def timeline_apart(plan: Plan, problem: Problem, times_s: np.ndarray) -> EncoderTimeline:
    """The same for groups that take `times_s`, with the costs and the ranks of `problem`."""
    schedule, num_parts = schedule_of(plan), np.ones(len(problem.all_image_s), dtype=np.int64)
    numbers = gathered(np.arange(len(num_parts)), problem.first_image, schedule.rows)[0].tolist()  # in plan order
    on_ranks, in_passes = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for group in plan.groups:
        for split in group.splits:
            num_parts[numbers[len(on_ranks) + split.image]] = len(split.ranks)
        on_ranks += encoding_ranks(group.encoders, group.splits)
        if group.passes:
            in_passes += encoding_ranks(group.passes, [replace(split, ranks=split.passes) for split in group.splits])
    in_order = np.argsort(numbers)
    images = encoded_images(problem, schedule, num_parts)
    images = images.on_ranks(flat([on_ranks[place] for place in in_order])[0])
    passes = flat([in_passes[place] for place in in_order])[0] if plan.vision.num_passes else None
    return timeline_of(problem, schedule, times_s, images, passes, plan.vision.keeps)


def idle_fraction(plan: Plan) -> float:
    """Share of a plan's rank-time in which a rank has nothing to do: no pack, no images to encode, and no fixed costs
    (`plan.fixed_s`).
    """
    busy = sum(group.predicted_time_s * group.degree for group in plan.groups)
    if apart := apart_timeline(plan):
        busy += float((apart.forward_busy_s + apart.backward_busy_s).sum())
    fixed_s = (plan.fixed_s * len(fixed_starts(plan)) + plan.update_s) * plan.cluster.num_ranks
    return 1.0 - (busy + fixed_s) / (plan.predicted_time_s * plan.cluster.num_ranks)
