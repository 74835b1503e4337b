"""What each rank computes in a plan, in the amounts that a cost's constants are multiplied with.

For a pack on d ranks, each of its ranks has one row; a rank's rows come in the order in which it runs them:

    quadratic_s   sum of (s^2 + s min(s, attention_block)) / d
    linear_s      sum of s / d            vision_quadratic_s   sum of p^2 over the frames that the rank encodes here
    pack_s        1                       vision_linear_s      sum of p
                                          encoder_pass_s       1 where it encodes any

Where images are encoded apart from the packs, a rank that encodes some has two rows more, behind its packs: of the
phase before them, `vision_forward` of its images' amounts, and of the phase after them the rest, with the forward pass
once more where activations are not kept. What ranks exchange is in none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost import CostModel, pairs_of
from dhp_ray.planner.plan import Plan
from dhp_ray.planner.schedule import firsts_of, flat

TERMS = ("quadratic_s", "linear_s", "vision_quadratic_s", "vision_linear_s", "encoder_pass_s", "pack_s")
"""The constants of compute, in the order of `Work.amounts`."""

IMAGES = slice(2, 5)
"""Those of images among them."""

PAID_ONCE = ("pack_s",)
"""Those that a pack takes once, on a slow rank too."""

ENCODE, BACKWARD = -2, -1
"""In place of a group's number: the encoder's phase before the packs, and the one after them."""


class Work(NamedTuple):
    """Rows of ranks: `rank`, `group` (its number in the plan, or a phase), and `amounts` (rows, TERMS)."""

    rank: np.ndarray
    group: np.ndarray
    amounts: np.ndarray

    def seconds(self, cost: CostModel) -> np.ndarray:
        """Of each row at nominal speed."""
        found: np.ndarray = self.amounts @ constants_of(cost)
        return found

    def seconds_of_ranks(self, cost: CostModel, num_ranks: int, terms: Sequence[str] = TERMS) -> list[float]:
        """Of each rank at nominal speed, all its rows together; of these terms alone."""
        counted = np.where(np.isin(TERMS, terms), constants_of(cost), 0.0)
        return np.bincount(self.rank, self.amounts @ counted, num_ranks).tolist()  # type: ignore[no-any-return]


def constants_of(cost: CostModel) -> np.ndarray:
    """The constants of TERMS."""
    return np.array([getattr(cost, name) for name in TERMS])


def work_of(plan: Plan) -> Work:
    """What the ranks of a plan compute. O(ranks of all groups + images)."""
    ranks, degrees = flat([group.ranks for group in plan.groups])
    rows, sizes = flat([group.pack.sequences for group in plan.groups])
    tokens = np.array([sample.num_tokens for sample in plan.samples], dtype=np.float64)[rows]
    number = np.arange(len(degrees))
    owner = np.repeat(number, sizes)
    shared = np.zeros((len(degrees), len(TERMS)))
    for place, amount in ((0, pairs_of(tokens, _constant(plan, "attention_block"))), (1, tokens)):
        shared[:, place] = np.bincount(owner, amount, len(degrees)) / degrees
    shared[:, -1] = 1.0
    group = np.repeat(number, degrees)
    amounts = shared[group]
    phases = None
    grids = [grid for row in rows.tolist() for grid in plan.samples[row].vision_grids]
    if grids:
        time, height, width = np.array(grids, dtype=np.float64).T
        images = np.stack([time * (height * width) ** 2, time * height * width], 1)
        encoder, counts = flat([group.encoders for group in plan.groups])
        if plan.vision.apart:
            phases = _phases(plan, encoder, images)
        else:
            amounts[:, IMAGES] = _with_pass(_of_members(ranks, degrees, encoder, counts, images))
    order = np.argsort(ranks, kind="stable")
    found = Work(ranks[order], group[order], amounts[order])
    return found if phases is None else Work(*(np.concatenate(pair) for pair in zip(found, phases)))


def _constant(plan: Plan, name: str) -> float:
    """Of the cost that the plan was made with."""
    return float(plan.inputs.get("cost", {}).get(name, getattr(CostModel, name)))


def _with_pass(images: np.ndarray) -> np.ndarray:
    """The amounts of images (rows, 2), and whether there are any."""
    return np.column_stack([images, images[:, 1] > 0])


def _of_members(
    ranks: np.ndarray, degrees: np.ndarray, encoder: np.ndarray, counts: np.ndarray, images: np.ndarray
) -> np.ndarray:
    """Amounts (members of all groups, 2) of the images that each encodes: of group g those of `counts[g]` images."""
    found = np.zeros((len(ranks), 2))
    first_rank, first_image = firsts_of(degrees), firsts_of(counts)
    for number in np.flatnonzero(counts).tolist():
        begin, stop = first_image[number : number + 2]
        members = {rank: place for place, rank in enumerate(
            ranks[first_rank[number] : first_rank[number + 1]].tolist(), first_rank[number])}
        np.add.at(found, [members[rank] for rank in encoder[begin:stop].tolist()], images[begin:stop])
    return found


def _phases(plan: Plan, encoder: np.ndarray, images: np.ndarray) -> Work:
    """Rows of both phases, rank by rank; of the first alone where nothing of the encoder is trained."""
    forward = _constant(plan, "vision_forward")
    encoding, place = np.unique(encoder, return_inverse=True)
    sums = np.zeros((len(encoding), 2))
    np.add.at(sums, place, images)
    shares = [forward] if forward == 1.0 else [forward, 1.0 - forward + (0.0 if plan.vision.keeps else forward)]
    amounts = np.zeros((len(encoding), len(shares), len(TERMS)))
    amounts[:, :, IMAGES] = _with_pass(sums)[:, None] * np.array(shares)[:, None]
    return Work(np.repeat(encoding, len(shares)), np.tile([ENCODE, BACKWARD][: len(shares)], len(encoding)),
                amounts.reshape(-1, len(TERMS)))
