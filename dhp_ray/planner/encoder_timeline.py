"""When ranks encode, run packs and run the encoder's backward pass, if images are encoded apart from the packs.

    rank 0  encode i0, i1 | features | pack a ............ | gradients | backward of i0, i1
    rank 1  encode i2     | features | pack b ... | pack c | gradients | backward of i2

A rank begins its packs once every rank that it exchanges features with has encoded, and the rows have arrived. It
begins the backward pass once every rank that it exchanges gradients with has run its packs. Two ranks exchange if one
encodes an image of a pack that the other runs. There is no barrier of all ranks.

With sync=micro_batch every phase is such a barrier: all ranks run the same number of encoder passes, in lockstep, and
each pass, exchange and micro-batch ends with the rank that takes longest.

    rank 0  pass 0 .. | pass 1 ... | features | pack a ........ | pack c ... | gradients | backward of both passes
    rank 1  pass 0 .. | pass 1 .   | features | pack b ...      | pack d ... | gradients | backward of both passes
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.encoded_images import EncodedImages
from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.primitives.list_schedule import list_schedule_from


class EncoderTimeline(NamedTuple):
    """Seconds since the step began. The `fixed_s` that all ranks pay at the start is not included; the `fixed_s` of
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


class Packs(NamedTuple):
    """Group g runs on `ranks[first_rank[g]:first_rank[g + 1]]` for `times_s[g]` seconds, without its images, in
    `micro_batch[g]`.
    """

    ranks: np.ndarray
    first_rank: np.ndarray
    times_s: np.ndarray
    micro_batch: np.ndarray


def timeline_of(
    images: EncodedImages, passes: np.ndarray | None, packs: Packs, speeds: np.ndarray, cost: CostModel, keeps: bool
) -> EncoderTimeline:
    """The timeline of either mode. `passes`: the pass of each image on its rank, with sync=micro_batch."""
    if passes is None:
        return encoder_timeline(images, packs, speeds, cost, keeps)
    return lockstep_timeline(images, passes, packs, speeds, cost, keeps)


def encoder_timeline(
    images: EncodedImages, packs: Packs, speeds: np.ndarray, cost: CostModel, keeps: bool
) -> EncoderTimeline:
    """The timeline with sync=step."""
    forward, backward = _shares(cost, keeps)
    busy_s = np.bincount(images.encoder, images.seconds / speeds[images.encoder], len(speeds))
    busy_s = busy_s + cost.encoder_pass_s * (busy_s > 0) / speeds
    encoded_s = forward * busy_s
    exchange_s = _exchange_s(images, packs, len(speeds), cost)
    ready_s = _meeting(images, packs, encoded_s) + exchange_s
    starts_s, ended_s = list_schedule_from(ready_s, packs.ranks, packs.first_rank, packs.times_s)
    begin_s = end_s = ended_s
    if backward:
        begin_s = _meeting(images, packs, ended_s) + exchange_s
        end_s = begin_s + backward * busy_s
    return EncoderTimeline(encoded_s, ready_s, starts_s, ended_s, begin_s, end_s, forward * busy_s, backward * busy_s)


def lockstep_timeline(
    images: EncodedImages, passes: np.ndarray, packs: Packs, speeds: np.ndarray, cost: CostModel, keeps: bool
) -> EncoderTimeline:
    """The timeline with sync=micro_batch. `passes`: the pass of each image on its rank. A pass takes as long as its
    images on the slowest rank, and at least as long as gathering the encoder's parameters and reducing its gradients.
    """
    num_ranks, num_passes = len(speeds), int(passes.max()) + 1
    seconds = np.bincount(images.encoder * num_passes + passes, images.seconds, num_ranks * num_passes)
    busy_s = seconds.reshape(num_ranks, num_passes)
    busy_s = (busy_s + cost.encoder_pass_s * (busy_s > 0)) / speeds[:, None]
    passes_s = float(np.maximum(busy_s.max(axis=0), cost.encoder_gather_s).sum())
    forward_s, backward_s = _shares(cost, keeps)
    exchange_s = float(_exchange_s(images, packs, num_ranks, cost).max())
    slowest_s = np.zeros(int(packs.micro_batch.max()) + 1)
    np.maximum.at(slowest_s, packs.micro_batch, packs.times_s)
    numbers = np.unique(packs.micro_batch)  # `fixed_s` counts only for micro-batches with packs
    begins_s = np.zeros(len(slowest_s))
    begins_s[numbers] = np.cumsum(slowest_s[numbers] + cost.fixed_s) - slowest_s[numbers] - cost.fixed_s
    ready_s = forward_s * passes_s + exchange_s
    ended_s = ready_s + float(slowest_s.sum()) + cost.fixed_s * (len(numbers) - 1)
    begin_s = ended_s + exchange_s * (backward_s > 0)
    encoded_s, ready_all_s, ended_all_s, begin_all_s, end_s = (
        np.full(num_ranks, at_s)
        for at_s in (forward_s * passes_s, ready_s, ended_s, begin_s, begin_s + backward_s * passes_s))
    return EncoderTimeline(encoded_s, ready_all_s, ready_s + begins_s[packs.micro_batch], ended_all_s, begin_all_s,
                           end_s, forward_s * busy_s.sum(axis=1), backward_s * busy_s.sum(axis=1))


def _shares(cost: CostModel, keeps: bool) -> tuple[float, float]:
    """The share of an image's seconds in each phase; 0 for the second phase if nothing of the encoder is trained."""
    forward = cost.vision_forward
    return forward, 0.0 if forward == 1.0 else 1.0 - forward + (0.0 if keeps else forward)


def _exchange_s(images: EncodedImages, packs: Packs, num_ranks: int, cost: CostModel) -> np.ndarray:
    """Seconds of each rank for the rows that it sends or receives, whichever are more. The ranks of a group have equal
    shares of an image's rows.
    """
    rows = _compiled_most_rows(images.rows, images.encoder, images.group, packs.ranks, packs.first_rank, num_ranks)
    seconds: np.ndarray = cost.feature_bytes / cost.slowest_bytes_per_s * rows
    return seconds


def _meeting(images: EncodedImages, packs: Packs, free_s: np.ndarray) -> np.ndarray:
    """When each rank and all ranks that it exchanges with are free."""
    return _compiled_meeting(images.encoder, images.group, packs.ranks, packs.first_rank, free_s)


@compiled
def _compiled_meeting(
    encoder: np.ndarray, group: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray, free_s: np.ndarray
) -> np.ndarray:
    meeting_s = free_s.copy()
    for image in range(len(encoder)):
        mine = encoder[image]
        for rank in ranks[first_rank[group[image]] : first_rank[group[image] + 1]]:
            meeting_s[rank] = max(meeting_s[rank], free_s[mine])
            meeting_s[mine] = max(meeting_s[mine], free_s[rank])
    return meeting_s


@compiled
def _compiled_most_rows(
    rows: np.ndarray, encoder: np.ndarray, group: np.ndarray, ranks: np.ndarray, first_rank: np.ndarray, num_ranks: int
) -> np.ndarray:
    sent, received = np.zeros(num_ranks), np.zeros(num_ranks)
    for image in range(len(encoder)):
        members = ranks[first_rank[group[image]] : first_rank[group[image] + 1]]
        for rank in members:
            if rank != encoder[image]:
                sent[encoder[image]] += rows[image] / len(members)
                received[rank] += rows[image] / len(members)
    return np.maximum(sent, received)
