"""Prices schedules: the predicted time of each group on its ranks, its memory, and which member encodes which image."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.encoded_images import EncodedImages
from dhp_ray.planner.encoders import encoders_of
from dhp_ray.planner.plan import GroupPlan, Pack, SplitImage
from dhp_ray.planner.primitives.list_schedule import list_schedule
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.rates import encoding_s, running_s
from dhp_ray.planner.schedule import Ranks, Schedule, crosses_nodes, firsts_of, flat, gathered


class PackTimes(NamedTuple):
    """By group: its seconds; those in which its busiest member encodes images; and all others that it computes or
    waits for its own members. A pack may take longer than both together, for its layers' parameters (`least_s`).
    """

    pack_s: np.ndarray
    encode_s: np.ndarray
    rest_s: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[GroupPlan]) -> PackTimes:
        """Those of a plan."""
        return cls(*(np.array([getattr(group, name) for group in groups], dtype=np.float64)
                     for name in ("predicted_time_s", "encode_s", "rest_s")))


def times_of(problem: Problem, schedule: Schedule) -> PackTimes:
    """The times of each group."""
    items, first_rank, degree = problem.items, schedule.first_rank[:-1], np.diff(schedule.first_rank)
    rates = problem.machine.rates[degree]
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
    seconds: np.ndarray = np.maximum(pack_s, encode_s + rest_s)
    return seconds


def time_of(problem: Problem, schedule: Schedule) -> float:
    """Seconds of the whole step under a schedule."""
    return makespan_of(problem, schedule, times_of(problem, schedule))


def new_groups(problem: Problem, schedule: Schedule) -> list[Ranks]:
    """The process groups of a schedule that are not in the pool."""
    ranks, first, pool = schedule.ranks.tolist(), schedule.first_rank.tolist(), set(problem.pool)
    groups = dict.fromkeys(tuple(ranks[begin:end]) for begin, end in pairwise(first) if end - begin > 1)
    return [group for group in groups if group not in pool]


def making_s(problem: Problem, schedule: Schedule) -> float:
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
) -> tuple[GroupPlan, ...]:
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
            GroupPlan(
                tuple(ranks[rank[group] : rank[group + 1]]),
                Pack(tuple(rows[row[group] : row[group + 1]])),
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
