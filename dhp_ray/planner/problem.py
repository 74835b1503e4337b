"""A batch to plan: its sequences as arrays (the items that planners place), the cluster and the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.rates import Rate, Rates, predicted_s
from dhp_ray.planner.encoder.members import fullest_member_s
from dhp_ray.planner.errors import PlanError, SequenceTooLongError
from dhp_ray.planner.plan.cluster import ClusterSpec, sizes_of
from dhp_ray.planner.plan.types import Sample
from dhp_ray.planner.primitives.best_fit import Packs
from dhp_ray.planner.primitives.compiled import inner
from dhp_ray.planner.schedule import Ranks, firsts_of

DEGREES = 32
"""`fullest_s` of an item has an entry for each degree from 1 to DEGREES."""

ITEM = np.dtype(
    [(name, np.float64) for name in ("language_s", "attention_s", "vision_s", "image_s", "host_s")]
    + [("tokens", np.int64), ("minimum_degree", np.int64), ("fullest_s", np.float64, (DEGREES,))]
)
"""One item; seconds are of one nominal rank.

attention_s: a part of language_s. vision_s: all its images; image_s: the largest of them. fullest_s[d - 1]: on d ranks,
the images of the most loaded rank. host_s: its activations over a rank's link to host memory, one way, if all of them
were moved. minimum_degree: the fewest ranks that hold it. A pack has the sums of its sequences, their
largest `image_s`, and `fullest_s` of all their images.
"""

Item: TypeAlias = np.record
Items: TypeAlias = np.recarray


class Machine(NamedTuple):
    """The cluster and its costs (`CostModel.rates`).

    uniform: all ranks have speed 1. tokens_per_rank: for packs of several sequences (`cheap_tokens`).
    most_tokens_per_rank: for a single sequence.

    Rank r is on node `node[r]`; node n has the ranks from `first[n]` to `first[n + 1]` (`neighbours`), at most
    `ranks_per_node`.
    """

    speeds: np.ndarray
    node: np.ndarray
    first: np.ndarray
    ranks_per_node: int
    tokens_per_rank: int
    most_tokens_per_rank: int
    uniform: bool
    rates: Rates


def items_of(most_tokens_per_rank: int, **columns: np.ndarray) -> Items:
    """The items with these fields, and the fewest ranks that hold each."""
    items = np.recarray(len(columns["tokens"]), dtype=ITEM)
    for name in (field for field in ITEM.names or () if field != "minimum_degree"):
        items[name] = columns[name]
    items.minimum_degree = -(-items.tokens // most_tokens_per_rank)
    return items


def times_at(items: Items, degree: int, machine: Machine) -> np.ndarray:
    """Seconds of every item on `degree` nominal ranks, in one node if they fit."""
    rate = machine.rates[degree]
    transfer_s = rate.across_s if degree > machine.ranks_per_node else rate.inside_s
    if degree <= DEGREES:
        encode_s = items.fullest_s[:, degree - 1]
    else:
        encode_s = np.maximum(items.vision_s / degree, items.image_s)
    encode_s = encode_s + rate.encoder_pass_s * (items.image_s > 0)
    return predicted_s(
        items.language_s,
        items.attention_s,
        encode_s,
        items.host_s,
        items.tokens,
        degree,
        1.0,
        transfer_s,
        rate,
    )


@inner
def encode_s_of(item: Item, degree: int) -> float:
    """Seconds of the images of the most loaded of `degree` nominal ranks; above DEGREES as if they were dealt out
    evenly.
    """
    if degree <= DEGREES:
        return float(item.fullest_s[degree - 1])
    return max(item.vision_s / degree, item.image_s)


@inner
def time_s(item: Item, degree: int, crosses: bool, speed: float, rate: Rate) -> float:
    """Seconds of an item on `degree` ranks, the slowest of which has `speed`."""
    encode_s = encode_s_of(item, degree)
    if item.image_s > 0.0:
        encode_s += rate.encoder_pass_s
    transfer_s = rate.across_s if crosses else rate.inside_s
    return predicted_s(
        item.language_s,
        item.attention_s,
        encode_s / speed,
        item.host_s,
        item.tokens,
        degree,
        speed,
        transfer_s,
        rate,
    )


@inner
def least_degree(item: Item, time_limit_s: float, fastest: float, node_size: int, rates: Rates, most: int) -> int:
    """The fewest ranks, if all had the fastest speed, that run an item within a time, inside a node if they fit; 0 if
    that takes more than `most`.

    O(1) unless communication dominates.
    """
    degree = max(item.minimum_degree, int(item.language_s / (time_limit_s * fastest)))
    while degree <= most:
        if time_s(item, degree, degree > node_size, fastest, rates[degree]) <= time_limit_s:
            return degree
        degree += 1
    return 0


ENCODERS = ("group", "world", "auto")
"""Where images are encoded (`VisionPlan`). auto: whichever makes the shorter plan of a batch."""


@dataclass(frozen=True)
class Problem:
    """A batch as the planners see it.

    items: one ITEM for each sequence. all_image_s: seconds of each image on a nominal rank, those of sequence i from
    first_image[i] on; all_image_patches likewise, and all_image_rows, the tokens of each. encoder: a name of ENCODERS.
    lower_bound_s: from `bound`, once known. joins_most: packs of several sequences may have the most tokens that a rank
    holds, even if they then wait for copies to host memory; otherwise those of `cheap_tokens`.
    """

    samples: tuple[Sample, ...]
    cluster: ClusterSpec
    cost: CostModel
    sync: str
    pool: tuple[Ranks, ...]
    items: Items
    first_image: np.ndarray
    all_image_s: np.ndarray
    all_image_patches: np.ndarray
    all_image_rows: np.ndarray
    encoder: str = "group"
    lower_bound_s: float = 0.0
    joins_most: bool = False

    @cached_property
    def speeds(self) -> np.ndarray:
        return np.array(self.cluster.speeds)

    @cached_property
    def machine(self) -> Machine:
        speeds, nodes = self.speeds, self.cluster.nodes
        return Machine(
            speeds,
            np.array(nodes),
            firsts_of(sizes_of(nodes)),
            self.cluster.ranks_per_node,
            self.cluster.most_tokens_per_rank if self.joins_most else cheap_tokens(self.cost, self.cluster),
            self.cluster.most_tokens_per_rank,
            bool((speeds == 1.0).all()),
            self.cost.rates(len(speeds), self.cluster.layer_share),
        )

    @cached_property
    def nominal_machine(self) -> Machine:
        """The cluster without its speeds, for planners that ignore them."""
        return self.machine._replace(speeds=np.ones(self.cluster.num_ranks), uniform=True)


def packed(problem: Problem, packs: Packs) -> Items:
    """Make every pack of sequences an item, whose images count as dealt out evenly."""
    items, first = problem.items, packs.first[:-1]
    sums = {name: np.add.reduceat(items[name][packs.rows], first)
            for name in ("tokens", "language_s", "attention_s", "vision_s", "host_s")}
    image = np.maximum.reduceat(items.image_s[packs.rows], first)
    return items_of(problem.cluster.most_tokens_per_rank, image_s=image,
                    fullest_s=_evenly_s(sums["vision_s"], image), **sums)


def _fullest_s(
    rows: np.ndarray, first: np.ndarray, first_image: np.ndarray, all_image_s: np.ndarray, all_patches: np.ndarray,
    num_ranks: int,
) -> np.ndarray:
    """`fullest_s` of the items of packs, for up to as many ranks as there are; 0 beyond."""
    fullest = np.zeros((len(first) - 1, DEGREES))
    most = min(DEGREES, num_ranks)
    fullest[:, :most] = fullest_member_s(rows, first, first_image, all_image_s, all_patches, most)
    return fullest


def _evenly_s(vision_s: np.ndarray, image_s: np.ndarray) -> np.ndarray:
    """`fullest_s` of items whose images are dealt out evenly, but at least the largest image."""
    return np.maximum(vision_s[:, None] / np.arange(1, DEGREES + 1), image_s[:, None])


def cheap_tokens(cost: CostModel, cluster: ClusterSpec) -> int:
    """Tokens a rank up to which packs recompute nothing, and copies to host memory take no longer than the forward pass
    of that much text; up to this number sequences are packed together. `cluster.tokens_per_rank` if nothing is moved.

    t tokens compute for at least linear_s t, `forward` of it forward, and copy for slope host_s(1) (t - from_tokens).
    """
    if not cluster.offload.share:
        return cluster.tokens_per_rank
    copied_s = cluster.offload.slope * float(cost.host_s(1.0))
    hidden_s = cost.forward * cost.linear_s
    if copied_s <= hidden_s:
        return cluster.most_tokens_per_rank
    hidden = copied_s * cluster.offload.from_tokens / (copied_s - hidden_s)
    return int(min(max(hidden, cluster.tokens_per_rank), cluster.most_tokens_per_rank))


def problem_of(
    samples: Sequence[Sample], cluster: ClusterSpec, cost: CostModel, sync: str, pool: Sequence[Ranks] = (),
    encoder: str = "group", deals_images: bool = True,
) -> Problem:
    """Check a batch and lay it out in arrays. `deals_images`: its images are dealt to ranks as they will be, which
    planners need. Without, `fullest_s` counts them as dealt out evenly, which is quicker: for those who do not read it.
    PlanError: there is no sequence, or one without tokens. SequenceTooLongError: one does not fit the whole cluster.
    """
    if not samples:
        raise PlanError("batch: no sequences; a batch has at least one")
    tokens = np.array([sample.text_tokens + sample.vision_tokens for sample in samples], dtype=np.int64)
    shortest, longest = int(tokens.argmin()), int(tokens.argmax())
    if tokens[shortest] < 1:
        raise PlanError(f"sample {samples[shortest].id}: {tokens[shortest]} tokens; a sequence has at least 1")
    if tokens[longest] > cluster.max_tokens:
        raise SequenceTooLongError(samples[longest].id, int(tokens[longest]), cluster.max_tokens)
    cost = cost.in_mode(sync)
    attention = cost.attention_s(tokens.astype(np.float64))
    grids = [sample.vision_grids for sample in samples]
    counts = np.fromiter(map(len, grids), np.int64, len(grids))
    images = np.fromiter(chain.from_iterable(chain.from_iterable(grids)), np.float64).reshape(-1, 3)
    seconds = cost.images_s(images)
    patches = images.prod(axis=1)
    owner, vision, image = np.repeat(np.arange(len(samples)), counts), np.zeros(len(samples)), np.zeros(len(samples))
    np.add.at(vision, owner, seconds)
    np.maximum.at(image, owner, seconds)
    of_sample = np.bincount(owner, patches, len(samples))
    host = cost.host_s(tokens.astype(np.float64), of_sample)
    each = np.arange(len(samples) + 1)
    fullest = (_fullest_s(each[:-1], each, firsts_of(counts), seconds, patches, cluster.num_ranks) if deals_images
               else _evenly_s(vision, image))
    items = items_of(cluster.most_tokens_per_rank, tokens=tokens, language_s=attention + cost.linear_s * tokens,
                     attention_s=attention, vision_s=vision, image_s=image, host_s=host, fullest_s=fullest)
    rows = patches * (np.array([sample.vision_tokens for sample in samples]) / np.maximum(of_sample, 1.0))[owner]
    return Problem(tuple(samples), cluster, cost, sync, tuple(pool), items, firsts_of(counts), seconds, patches, rows,
                   encoder)


def neighbours(nodes: Sequence[int]) -> np.ndarray | None:
    """The cluster's rank for each rank of a planner, which sees the ranks of a node as neighbours, the largest node
    first; None if they are in such an order already. Plans are mapped back (`renamed`).

        node of each rank   0 1 0 1 1      a planner's rank   0 1 2 3 4
                                           the cluster's        1 3 4 0 2
    """
    sizes = sizes_of(nodes)
    order = sorted(range(len(nodes)), key=lambda rank: (-sizes[nodes[rank]], nodes[rank]))
    return None if order == list(range(len(nodes))) else np.array(order)


def reordered(problem: Problem, order: np.ndarray) -> Problem:
    """The same problem with rank `order[r]` as rank r."""
    cluster, place = problem.cluster, np.argsort(order)
    there = replace(
        cluster,
        speeds=tuple([cluster.speeds[rank] for rank in order]),
        nodes=tuple([cluster.nodes[rank] for rank in order]),
    )
    usable = [ranks for ranks in problem.pool if len(ranks) > 1 and min(ranks) >= 0 and max(ranks) < len(order)]
    return replace(problem, cluster=there, pool=tuple([tuple(sorted(place[list(ranks)].tolist())) for ranks in usable]))
