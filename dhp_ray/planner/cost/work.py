"""What each rank computes in a plan, as amounts that are multiplied with the constants of a cost.

For a pack on d ranks, each of its ranks has one row; a rank's rows are in the order of execution:

    quadratic_s   sum of (s^2 + s min(s, attention_block)) / d
    linear_s      sum of s / d            vision_quadratic_s   sum of p^2 over the frames that the rank encodes here
    pack_s        1                       vision_linear_s      sum of p
                                          encoder_pass_s       1 if it encodes any

If images are encoded apart from the packs, a rank that encodes some has two more rows after its packs: for the phase
before them, `vision_forward` of its images' amounts; for the phase after them, if there is one, the rest, plus the
forward pass again if activations are not kept. For an image in parts each rank has its share. Exchanges between ranks
are not included.

What a pack computes again counts as often as it is computed, by the forward passes' shares of the cost that the plan
was made with. A separate value tells how long a pack waits for copies to host memory, which a run cannot distinguish
from compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.rates import pairs_of, waits_s
from dhp_ray.planner.plan.types import Grid, Pack, Plan, encoding_ranks, shares
from dhp_ray.planner.schedule import firsts_of, flat

TERMS = ("quadratic_s", "linear_s", "vision_quadratic_s", "vision_linear_s", "encoder_pass_s", "pack_s")
"""The constants of compute, in the order of `Work.amounts`."""

IMAGES = slice(2, 5)
"""The constants of images among TERMS."""

WAITS = "waits_s"
"""Name of `Work.waits_s`, which is not a constant but counts as one."""

PAID_ONCE = ("pack_s", WAITS)
"""Terms that take the same time on a slow rank."""

ENCODE, BACKWARD = -2, -1
"""Stand for a group's number: the encoder's phase before the packs, and the one after them."""


class Work(NamedTuple):
    """Rows of ranks: `rank`, `group` (its number in the plan, or a phase), `amounts` (rows, TERMS), and `waits_s`:
    seconds that the pack waits for copies to host memory and back, by the cost that the plan was made with.
    """

    rank: np.ndarray
    group: np.ndarray
    amounts: np.ndarray
    waits_s: np.ndarray

    def seconds(self, cost: CostModel, terms: Sequence[str] = (*TERMS, WAITS)) -> np.ndarray:
        """Seconds of each row at nominal speed, summed over these terms."""
        counted = np.where(np.isin(TERMS, terms), constants_of(cost), 0.0)
        return self.amounts @ counted + (self.waits_s if WAITS in terms else 0.0)

    def seconds_of_ranks(self, cost: CostModel, num_ranks: int, terms: Sequence[str] = (*TERMS, WAITS)) -> list[float]:
        """Seconds of each rank at nominal speed, summed over its rows and these terms."""
        return np.bincount(self.rank, self.seconds(cost, terms), num_ranks).tolist()

    def growth(self, before: CostModel, after: CostModel) -> float:
        """The median factor by which the seconds of rows grow from one cost to another; rows without a price do not
        count.
        """
        old_s = self.seconds(before)
        priced = old_s > 0
        return float(np.median(self.seconds(after)[priced] / old_s[priced])) if priced.any() else 1.0


def constants_of(cost: CostModel) -> np.ndarray:
    return np.array([getattr(cost, name) for name in TERMS])


def work_of(plan: Plan) -> Work:
    """What the ranks of a plan compute. O(ranks of all groups + images)."""
    ranks, degrees = flat([group.ranks for group in plan.groups])
    rows, sizes = flat([group.sequences for group in plan.groups])
    tokens = np.array([sample.num_tokens for sample in plan.samples], dtype=np.float64)[rows]
    number = np.arange(len(degrees))
    owner = np.repeat(number, sizes)
    shared = np.zeros((len(degrees), len(TERMS)))
    for place, amount in ((0, pairs_of(tokens, _constant(plan, "attention_block"))), (1, tokens)):
        shared[:, place] = np.bincount(owner, amount, len(degrees)) / degrees
    shared[:, -1] = 1.0
    recomputed = np.array([group.recomputed for group in plan.groups])
    shared[:, 1:] *= 1.0 + recomputed[:, None] * _constant(plan, "forward")  # attention does not run again
    group = np.repeat(number, degrees)
    amounts = shared[group]
    phases = None
    grids = [grid for row in rows.tolist() for grid in plan.samples[row].vision_grids]
    if grids:
        time, height, width = np.array(grids, dtype=np.float64).T
        images = np.stack([time * (height * width) ** 2, time * height * width], 1)
        if plan.vision.apart:
            phases = _phases(plan, grids, images)
        else:
            encoder, counts = flat([group.encoders for group in plan.groups])
            members = _of_members(ranks, degrees, encoder, counts, images)
            forward = _constant(plan, "vision_forward")
            often = 1.0 + recomputed[group] * (forward if forward < 1.0 else 0.0)
            amounts[:, IMAGES] = np.column_stack([members, members[:, 1] > 0]) * often[:, None]
    order = np.argsort(ranks, kind="stable")
    found = Work(ranks[order], group[order], amounts[order], _waits_s(plan)[group[order]])
    return found if phases is None else Work(*(np.concatenate(pair) for pair in zip(found, phases)))


def _waits_s(plan: Plan) -> np.ndarray:
    """Waits of each group at nominal speed."""
    found = np.zeros(len(plan.groups))
    moves = [number for number, group in enumerate(plan.groups) if group.offload]
    if moves:
        cost = CostModel.from_json(plan.inputs["cost"])
        found[moves] = [_waits_of_group(plan, plan.groups[number], cost) for number in moves]
    return found


def _waits_of_group(plan: Plan, group: Pack, cost: CostModel) -> float:
    samples = [plan.samples[row] for row in group.sequences]
    lengths = np.array([sample.num_tokens for sample in samples], dtype=np.float64)
    compute_s = float((cost.attention_s(lengths) + cost.linear_s * lengths).sum()) / group.degree
    grids = np.array([grid for sample in samples for grid in sample.vision_grids], dtype=np.float64).reshape(-1, 3)
    if plan.vision.apart:
        grids = grids[:0]
    elif len(grids):
        encode_s = np.bincount(group.encoders, cost.images_s(grids))
        compute_s += float(encode_s.max()) + cost.encoder_pass_s * bool(encode_s.any())
    copied_s = float(cost.host_s(lengths.sum(), grids.prod(axis=1).sum())) * group.offload / group.degree
    return float(waits_s(compute_s, copied_s, cost.forward))


def _constant(plan: Plan, name: str) -> float:
    return float(plan.inputs.get("cost", {}).get(name, getattr(CostModel, name)))


def _of_members(
    ranks: np.ndarray, degrees: np.ndarray, encoder: np.ndarray, counts: np.ndarray, images: np.ndarray
) -> np.ndarray:
    """Amounts (members of all groups, 2) of the images that each member encodes; group g has `counts[g]` images."""
    found = np.zeros((len(ranks), 2))
    first_rank, first_image = firsts_of(degrees), firsts_of(counts)
    for number in np.flatnonzero(counts).tolist():
        begin, stop = first_image[number : number + 2]
        members = {rank: place for place, rank in enumerate(
            ranks[first_rank[number] : first_rank[number + 1]].tolist(), first_rank[number])}
        np.add.at(found, [members[rank] for rank in encoder[begin:stop].tolist()], images[begin:stop])
    return found


def _phases(plan: Plan, grids: Sequence[Grid], images: np.ndarray) -> Work:
    """Rows of both phases, rank by rank; only of the first if nothing of the encoder is trained. `grids`: of all
    images, in plan order.
    """
    forward = _constant(plan, "vision_forward")
    by = [ranks for group in plan.groups for ranks in encoding_ranks(group.encoders, group.splits)]
    encoder, counts = flat(by)
    part_of = np.repeat(np.arange(len(by)), counts)
    share = np.ones(len(encoder))
    for image in np.flatnonzero(counts > 1).tolist():
        share[part_of == image] = shares(grids[image], len(by[image]))
    encoding, place = np.unique(encoder, return_inverse=True)
    sums = np.zeros((len(encoding), 3))
    np.add.at(sums[:, :2], place, images[part_of] * share[:, None])
    sums[:, 2] = _num_passes(plan, encoding)
    phases = [forward] if forward == 1.0 else [forward, 1.0 - forward + (0.0 if plan.vision.keeps else forward)]
    amounts = np.zeros((len(encoding), len(phases), len(TERMS)))
    amounts[:, :, IMAGES] = sums[:, None] * np.array(phases)[:, None]
    return Work(np.repeat(encoding, len(phases)), np.tile([ENCODE, BACKWARD][: len(phases)], len(encoding)),
                amounts.reshape(-1, len(TERMS)), np.zeros(len(encoding) * len(phases)))


def _num_passes(plan: Plan, encoding: np.ndarray) -> np.ndarray:
    """Passes of these ranks that have images: those of the plan with sync=micro_batch, otherwise one."""
    if not plan.vision.num_passes:
        return np.ones(len(encoding))
    passes = {pair for group in plan.groups for ranks, numbers in zip(
        encoding_ranks(group.encoders, group.splits),
        encoding_ranks(group.passes, [replace(split, ranks=split.passes) for split in group.splits]))
        for pair in zip(ranks, numbers)}
    counts = Counter(rank for rank, _ in passes)
    return np.array([counts[rank] for rank in encoding.tolist()], dtype=np.float64)
