"""Chooses how a run trains if settings are auto: how its ranks synchronise, and whether activations are recomputed.

Among the modes in which the ranks hold the longest sequence and have room for the largest image, the one with the
shortest step is taken; if there is no such mode, the one with the most room. Steps are compared on the run's first
batch, planned for each mode's room and costs by the planner of last resort. If no batch has
been read, a batch of equal sequences as large as the largest image is used. So the lengths of the batch decide:
recomputation costs a third of the forward and backward passes, and saves the exchanges of long sequences on many ranks,
and short packs' launches and gathers.

    a 3B on 64 H100, video-heavy: step 8.6 s with 2,170 tokens a rank, 7.0 s with recomputation and 62,816;
                                  micro_batch 6.8 s with 3,191, and is taken
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner import LAST_RESORT, plan_batch
from dhp_ray.planner.cost.model import SYNCS, CostModel
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, NO_RECOMPUTATION, ClusterSpec, Offload, Recomputation
from dhp_ray.planner.plan.types import Plan, Sample
from dhp_ray.planner.timeline import PackTimes, micro_batches_s

COMPARED_RANKS = 256
"""Modes are compared on at most this many ranks, with their share of the batch, unless its longest sequence needs more;
a plan for 4,096 ranks takes seconds.
"""

TIE = 0.01
"""Modes whose steps differ by a smaller share count as equally fast, since costs are not known better; the first of
them is taken, in which ranks wait for one another least. In a manual test on the 24 cases of benchmarks/modes.py, 0.02
changed one case, which then took 3 % longer.
"""

MEMORY_SHARE = 0.9
"""The share of a device's memory, and of a node's, that plans use; the rest is for the allocator and libraries."""

AGAIN = {"false": "", "selective": " with selective recomputation", "true": " with recomputation"}
"""What all packs may recompute, and how a mode is told: nothing, all but attention, whose results are kept, or all."""

ALLOWED = {"auto": tuple(AGAIN), "packs": ("false",)}
"""For values of `train.activation_checkpointing` that are none of these, those that they allow: where all packs
recompute nothing, those that do not fit otherwise then recompute as many layers as they must, all but attention.
"""


class Mode(NamedTuple):
    """How ranks synchronise (step, micro_batch), what all packs recompute (`AGAIN`; with false, some of them may
    recompute layers: `Offer.recomputation`), and the most ranks that share a layer's experts: in force is the largest
    divisor of ranks and experts up to it (`ModelShape.ranks_that_share`).
    """

    sync: str
    recomputes: str = "false"
    expert_parallel: int = 1

    def __str__(self) -> str:
        shared = f", experts shared by up to {self.expert_parallel} ranks" if self.expert_parallel > 1 else ""
        return f"{self.sync}{AGAIN[self.recomputes]}{shared}"


PLAIN = Mode("step")


def allowed_modes(sync: str, recomputes: str, sharing: Sequence[int] = (1,)) -> list[Mode]:
    """The modes that these values of `planner.sync` and `train.activation_checkpointing` leave open, ordered by the
    memory that their parameters need, most first. `sharing`: how many ranks may share experts, in ascending order; more
    than one only with micro_batch.
    """
    return [Mode(each, again, shared) for each in (SYNCS if sync == "auto" else (sync,))
            for again in ALLOWED.get(recomputes, (recomputes,))
            for shared in sharing if shared == 1 or each == "micro_batch"]


@dataclass(frozen=True)
class Offer:
    """What ranks have in a mode: tokens of a pack (more with `offload` or `recomputation`), costs, and the seconds to
    gather and reduce for a pack's (or micro-batch's) layers, which compute cannot shorten; 0 if a rank has all
    parameters. `has_image_room`: whether ranks have room for the largest image of the run. `step_s`: of the batch by
    which modes are compared; infinite: it is not held, or not known yet.
    """

    mode: Mode
    tokens_per_rank: int
    cost: CostModel
    gather_s: float = 0.0
    offload: Offload = NO_OFFLOAD
    recomputation: Recomputation = NO_RECOMPUTATION
    has_image_room: bool = True
    step_s: float = math.inf

    @property
    def most_tokens(self) -> int:
        """Of a pack; without layers that are moved or recomputed if there is no room for the largest image."""
        if not self.has_image_room:
            return self.tokens_per_rank
        return max(self.tokens_per_rank, self.offload.tokens_per_rank, self.recomputation.tokens_per_rank)

    def holds(self, tokens_per_rank: int) -> bool:
        return self.has_image_room and self.tokens_per_rank >= 1 and self.most_tokens >= tokens_per_rank

    def seconds_of(self, samples: Sequence[Sample], nodes: Sequence[int]) -> float:
        """Seconds of a batch that ranks on these nodes hold."""
        cluster = ClusterSpec.of_nodes(nodes, self.tokens_per_rank, offload=self.offload,
                                       recomputation=self.recomputation)
        plan = plan_batch(samples, cluster, replace(self.cost, group_s=0.0), planner=LAST_RESORT, sync=self.mode.sync)
        return plan.predicted_time_s + _gathering_s(plan, self.gather_s)


def equal_samples(num_sequences: int, sequence_tokens: int, merge_area: int) -> list[Sample]:
    """A batch of images only, or of text only. `merge_area`: patches of a vision token; 0: there are no images."""
    tokens, grids = ((0, sequence_tokens), ((1, merge_area, sequence_tokens),)) if merge_area else (
        (sequence_tokens, 0), ())
    return [Sample(str(number), *tokens, grids) for number in range(num_sequences)]


def held_samples(samples: Sequence[Sample], limit_tokens: int) -> list[Sample]:
    return [sample for sample in samples if sample.num_tokens <= limit_tokens]


def timed(offers: Sequence[Offer], needed_tokens: int, samples: Sequence[Sample], nodes: Sequence[int]) -> list[Offer]:
    """The offers with the seconds of a batch on ranks of these nodes; infinite if a mode does not hold `needed_tokens`
    a rank or the batch's longest sequence on all of them, or has no room for the largest image.
    """
    longest = max(sample.num_tokens for sample in samples)
    needed = max(1, needed_tokens, math.ceil(longest / len(nodes)))
    holding = [offer for offer in offers if offer.holds(needed)]
    least = min((offer.most_tokens for offer in holding), default=1)
    num_ranks = min(len(nodes), max(COMPARED_RANKS, math.ceil(longest / least)))
    part = list(samples)
    if num_ranks < len(nodes):
        count = math.ceil(len(samples) * num_ranks / len(nodes))
        part.sort(key=lambda sample: -sample.num_tokens)
        part = [part[place * len(part) // count] for place in range(count)]  # the longest among them
    return [replace(offer, step_s=offer.seconds_of(part, nodes[:num_ranks]) if offer in holding else math.inf)
            for offer in offers]


def _gathering_s(plan: Plan, gather_s: float) -> float:
    """Estimated seconds that gathering adds to a step if packs (or micro-batches) wait for it."""
    times = PackTimes.of(plan.groups)
    if plan.sync == "micro_batch":
        seconds = micro_batches_s(np.array([group.micro_batch for group in plan.groups]), times)
        return float(np.maximum(0.0, gather_s - seconds).sum())
    waits_s = np.zeros(plan.cluster.num_ranks)
    for group, wait_s in zip(plan.groups, np.maximum(0.0, gather_s - times.pack_s)):
        waits_s[list(group.ranks)] += wait_s
    return float(waits_s.max())


def choose(offers: Sequence[Offer], needed_tokens: int) -> Offer:
    """The fastest offer that holds this many tokens a rank, the first of several within `TIE`; otherwise the last one
    with the most room. Offers are `timed`, and ordered by the memory that they need, most first.
    """
    holding = [offer for offer in offers if offer.holds(needed_tokens) and offer.step_s < math.inf]
    if holding:
        least_s = min(offer.step_s for offer in holding)
        return next(offer for offer in holding if offer.step_s <= (1 + TIE) * least_s)
    return max(reversed(offers), key=lambda offer: offer.most_tokens)


def reason(offers: Sequence[Offer], needed_tokens: int, samples: Sequence[Sample]) -> str:
    """Why `choose` takes its offer: what each holds and its seconds for a batch, in one line."""
    parts = []
    for offer in offers:
        if offer.most_tokens < max(1, needed_tokens):
            parts.append(f"{offer.mode} holds {offer.most_tokens:,}")
        elif offer.step_s == math.inf:
            parts.append(f"{offer.mode} has no room for the largest image")
        else:
            parts.append(f"{offer.mode} takes {offer.step_s:.3g} s")
    lengths = sorted({sample.num_tokens for sample in samples})
    tokens = f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"
    return (f"a rank is to hold {max(1, needed_tokens):,} tokens, and a batch of {len(samples)} sequences of {tokens} "
            f"tokens is modelled: {'; '.join(parts)}")
