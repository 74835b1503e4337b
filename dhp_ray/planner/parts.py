"""What the packs of a plan may give one another (a sequence; a pack of at most FEW sequences may give two at once), and
the seconds of a pack after that. Groups keep their ranks.

`exchanges.py` of `micro_batch` and `critical_path.py` of `step` make plans shorter with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.encoders import longest_member_s
from dhp_ray.planner.items import Items, compiled_encoding_s, compiled_running_s
from dhp_ray.planner.primitives.compiled import inner
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.rates import Rates
from dhp_ray.planner.schedule import Schedule, by_owner, crosses_nodes

BETTER = 1e-6
"""The share of a time that counts as shorter."""

EFFORT = 1e7
"""The most exchanges of a plan that are compared; an exact timing counts as one for each sequence of the batch, and in
`micro_batch` so does listing a part."""

FEW = 6
"""The most sequences of a pack of which two may change packs together, once no exchange of single ones helps."""


class Batch(NamedTuple):
    """The sequences, the work of each (seconds of one rank), their images (seconds and patches, those of sequence i
    from first_image[i] on), and the tokens of a pack that a rank holds."""

    items: Items
    work: np.ndarray
    first_image: np.ndarray
    image_s: np.ndarray
    patches: np.ndarray
    tokens_per_rank: int


class Groups(NamedTuple):
    """Pack p runs on the members first[p] to first[p + 1], which have `speeds`. By pack: its micro-batch, its slowest
    speed, and the seconds of communication for each token."""

    first: np.ndarray
    speeds: np.ndarray
    micro_batch: np.ndarray
    slowest: np.ndarray
    transfer_s: np.ndarray


class Parts(NamedTuple):
    """What packs may give: a sequence (`row`; `second` is -1) or two. Before all these, part p is nothing of pack p (-1
    and -1). By part: its sequences, pack, work, the share of that that encodes images (in seconds too), and tokens."""

    row: np.ndarray
    second: np.ndarray
    pack: np.ndarray
    work: np.ndarray
    encoding: np.ndarray
    tokens: np.ndarray


def described(problem: Problem, schedule: Schedule) -> tuple[Batch, Groups, np.ndarray]:
    """A batch, the groups of a schedule, and the pack of each sequence."""
    degree = np.diff(schedule.first_rank)
    rates, speeds = problem.machine.rates, problem.speeds[schedule.ranks]
    crosses = crosses_nodes(schedule, np.array(problem.cluster.nodes))
    groups = Groups(schedule.first_rank, speeds, schedule.micro_batch,
                    np.minimum.reduceat(speeds, schedule.first_rank[:-1]),
                    np.where(crosses, rates[degree].across_s, rates[degree].inside_s))
    work = problem.items.language_s + problem.items.vision_s
    batch = Batch(problem.items, work, problem.first_image, problem.all_image_s, problem.all_image_patches,
                  problem.cluster.most_tokens_per_rank)
    pack_of = np.empty(len(problem.items), dtype=np.int64)
    pack_of[schedule.rows] = np.repeat(np.arange(len(degree)), np.diff(schedule.first_row))
    return batch, groups, pack_of


def in_packs(schedule: Schedule, pack_of: np.ndarray) -> Schedule:
    """The sequences in these packs, each pack in the order of the batch: so `pack_s` deals images to members."""
    rows, first_row = by_owner(pack_of, len(schedule.first_row) - 1)
    return schedule._replace(rows=rows, first_row=first_row)


def held_by(batch: Batch, schedule: Schedule) -> np.ndarray:
    """The tokens of each pack."""
    held: np.ndarray = np.add.reduceat(batch.items.tokens[schedule.rows], schedule.first_row[:-1]).astype(np.float64)
    return held


@inner
def move(parts: Parts, part: int, pack: int, pack_of: np.ndarray) -> None:
    if parts.row[part] >= 0:
        pack_of[parts.row[part]] = pack
    if parts.second[part] >= 0:
        pack_of[parts.second[part]] = pack


@inner
def parts_of(batch: Batch, pack_of: np.ndarray, num_packs: int, few: int) -> Parts:
    """Of each pack: nothing; each of its sequences; each two of them, if it has at most `few`."""
    size, last, before = np.zeros(num_packs, np.int64), np.full(num_packs, -1), np.full(len(pack_of), -1)
    for row in range(len(pack_of)):
        pack = pack_of[row]
        size[pack], before[row], last[pack] = size[pack] + 1, last[pack], row
    count = num_packs + len(pack_of)
    for pack in range(num_packs):
        count += size[pack] * (size[pack] - 1) // 2 if size[pack] <= few else 0
    parts = Parts(np.full(count, -1), np.full(count, -1), np.empty(count, np.int64), np.zeros(count), np.zeros(count),
                  np.zeros(count))
    parts.pack[:num_packs] = np.arange(num_packs)
    place = num_packs
    for row in range(len(pack_of)):
        second = -1
        while True:
            parts.row[place], parts.second[place], parts.pack[place] = row, second, pack_of[row]
            parts.work[place] = batch.work[row] + (batch.work[second] if second >= 0 else 0.0)
            parts.encoding[place] = batch.items[row].vision_s + (batch.items[second].vision_s if second >= 0 else 0.0)
            parts.tokens[place] = batch.items[row].tokens + (batch.items[second].tokens if second >= 0 else 0)
            place += 1
            second = before[second if second >= 0 else row]
            if second < 0 or size[pack_of[row]] > few:
                break
    return parts


@inner
def pack_s(
    batch: Batch, groups: Groups, rates: Rates, pack: int, pack_of: np.ndarray
) -> tuple[float, float, float, float]:
    """(seconds, those in which it encodes, the rest, as in `PackTimes`; tokens) of a pack."""
    language_s, attention_s, host_s, tokens, count, num_images = 0.0, 0.0, 0.0, 0.0, 0, 0
    for row in range(len(pack_of)):
        if pack_of[row] == pack:
            item = batch.items[row]
            language_s += item.language_s
            attention_s += item.attention_s
            host_s += item.host_s
            tokens += item.tokens
            num_images += item.image_s > 0.0
            count += 1
    degree, encode_s = groups.first[pack + 1] - groups.first[pack], 0.0
    rate = rates[degree]
    if num_images > 0:
        rows, count = np.zeros(count, dtype=np.int64), 0
        for row in range(len(pack_of)):
            if pack_of[row] == pack:
                rows[count] = row
                count += 1
        encode_s = longest_member_s(
            rows, batch.first_image, batch.image_s, batch.patches,
            groups.speeds[groups.first[pack] : groups.first[pack + 1]])
        encode_s += rate.encoder_pass_s / groups.slowest[pack]
    seconds = compiled_running_s(language_s, attention_s, encode_s, host_s, tokens, degree, groups.slowest[pack],
                                 groups.transfer_s[pack], rate)
    encode_s = compiled_encoding_s(encode_s, tokens, rate)
    return max(rate.least_s, seconds), encode_s, seconds - encode_s, tokens
