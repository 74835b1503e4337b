"""When ranks encode, run packs and run the encoder's backward pass, where images are encoded apart from the packs.

    rank 0  encode i0, i1 | features | pack a ............ | gradients | backward of i0, i1
    rank 1  encode i2     | features | pack b ... | pack c | gradients | backward of i2

A rank begins its packs once every rank that it exchanges features with has encoded, and the rows have travelled; it
begins the backward pass once every rank that it exchanges gradients with has run its packs. Two ranks exchange when one
encodes an image of a pack that the other runs. Nothing is a barrier of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.primitives.list_schedule import list_schedule_from


class EncodedImages(NamedTuple):
    """Images of a batch, apart from their packs; arrays by image. `seconds` of one nominal rank, forward and backward;
    `rows`: features; `encoder`: the rank that encodes it; `group`: the group that runs its sequence."""

    seconds: np.ndarray
    patches: np.ndarray
    rows: np.ndarray
    encoder: np.ndarray
    group: np.ndarray


class EncoderTimeline(NamedTuple):
    """Seconds from the step's begin, fixed costs left out. By rank: `encoded_s`, the end of the first phase; `ready_s`,
    the features are there; `ended_s`, its packs have run; `backward_s`, the second phase begins; `end_s`. `starts_s`:
    of each group."""

    encoded_s: np.ndarray
    ready_s: np.ndarray
    starts_s: np.ndarray
    ended_s: np.ndarray
    backward_s: np.ndarray
    end_s: np.ndarray

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max())


def encoder_timeline(
    images: EncodedImages, ranks: np.ndarray, first_rank: np.ndarray, times_s: np.ndarray, speeds: np.ndarray,
    cost: CostModel, keeps: bool,
) -> EncoderTimeline:
    """Group g runs on `ranks[first_rank[g]:first_rank[g + 1]]` for `times_s[g]` seconds, its images left out."""
    num_ranks = len(speeds)
    busy_s = np.bincount(images.encoder, images.seconds, num_ranks)
    busy_s = (busy_s + cost.encoder_pass_s * (busy_s > 0)) / speeds
    encoded_s = cost.vision_forward * busy_s
    exchange_s = cost.feature_bytes / cost.slowest_bytes_per_s * _most_rows(images, ranks, first_rank, num_ranks)
    ready_s = _meeting(images, ranks, first_rank, encoded_s) + exchange_s
    starts_s, ended_s = list_schedule_from(ready_s, ranks, first_rank, times_s)
    if cost.vision_forward == 1.0:  # nothing of the encoder is trained
        return EncoderTimeline(encoded_s, ready_s, starts_s, ended_s, ended_s, ended_s)
    backward_s = _meeting(images, ranks, first_rank, ended_s) + exchange_s
    again = 0.0 if keeps else cost.vision_forward
    return EncoderTimeline(encoded_s, ready_s, starts_s, ended_s, backward_s,
                           backward_s + (1.0 - cost.vision_forward + again) * busy_s)


def _meeting(images: EncodedImages, ranks: np.ndarray, first_rank: np.ndarray, free_s: np.ndarray) -> np.ndarray:
    """For each rank when it and all that it exchanges with are free."""
    return _compiled_meeting(images.encoder, images.group, ranks, first_rank, free_s)


def _most_rows(images: EncodedImages, ranks: np.ndarray, first_rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """Rows that each rank sends or receives, whichever are more; a group's ranks have equal shares of an image's."""
    return _compiled_most_rows(images.rows, images.encoder, images.group, ranks, first_rank, num_ranks)


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
