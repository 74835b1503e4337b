"""A batch to plan: its sequences as arrays, the cluster and the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from dhp_ray.planner.checks import PlanError, SequenceTooLongError
from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.encoders import fullest_member_s
from dhp_ray.planner.items import DEGREES, Items, Machine, items_of
from dhp_ray.planner.nodes import sizes_of
from dhp_ray.planner.plan import ClusterSpec, Sample
from dhp_ray.planner.primitives.packing import Packs
from dhp_ray.planner.schedule import Ranks, firsts_of

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
            float(speeds.min()),
            float(speeds.max()),
            self.cost.rates(len(speeds), self.cluster.layer_share),
        )

    @cached_property
    def nominal_machine(self) -> Machine:
        """The cluster without its speeds, for planners that ignore them."""
        return self.machine._replace(speeds=np.ones(self.cluster.num_ranks), uniform=True, slowest=1.0, fastest=1.0)


def packed(problem: Problem, packs: Packs, deals_images: bool = True) -> Items:
    """Make every pack of sequences an item. `deals_images`: its images are dealt to ranks as they will be; if false,
    they count as dealt out evenly, which is quicker.
    """
    items, first = problem.items, packs.first[:-1]
    tokens, language, attention, vision, host = (
        np.add.reduceat(array[packs.rows], first)
        for array in (items.tokens, items.language_s, items.attention_s, items.vision_s, items.host_s)
    )
    image = np.maximum.reduceat(items.image_s[packs.rows], first)
    if deals_images:
        fullest = _fullest_s(packs.rows, packs.first, problem.first_image, problem.all_image_s,
                             problem.all_image_patches, problem.cluster.num_ranks)
    else:
        fullest = _evenly_s(vision, image)
    return items_of(tokens, language, attention, vision, image, host, fullest, problem.cluster.most_tokens_per_rank)


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
    fullest: np.ndarray = np.maximum(vision_s[:, None] / np.arange(1, DEGREES + 1), image_s[:, None])
    return fullest


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

    Raises:
        PlanError: there is no sequence, or one without tokens.
        SequenceTooLongError: a sequence does not fit the whole cluster.
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
    items = items_of(tokens, attention + cost.linear_s * tokens, attention, vision, image, host, fullest,
                     cluster.most_tokens_per_rank)
    rows = patches * (np.array([sample.vision_tokens for sample in samples]) / np.maximum(of_sample, 1.0))[owner]
    return Problem(tuple(samples), cluster, cost, sync, tuple(pool), items, firsts_of(counts), seconds, patches, rows,
                   encoder)
