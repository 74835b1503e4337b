"""How a run trains where it is to choose: how its ranks synchronise, whether activations are recomputed, and where
parameters and gradient sums lie.

Of the modes in which the ranks hold the longest sequence, the one in which a batch takes least time; where none holds
it, the one with the most room. The batch is the run's first one, planned for each mode's room and costs by the planner
of last resort, which takes milliseconds; before any is read, one of equal sequences as large as the largest image. So
what decides is what the lengths make of the room: recomputation costs a third of the forward and backward passes, and
saves the exchanges of long sequences on many ranks, and short packs' launches and gathers.

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
from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.offload import NO_OFFLOAD, Offload
from dhp_ray.planner.plan import ClusterSpec, Plan, Sample

COMPARED_RANKS = 256
"""Of more ranks so many are planned for, with their share of the batch, unless its longest sequence takes more: modes
are compared again for every number of ranks that a run may have."""

TIE = 0.01
"""Modes whose steps differ by a smaller share count as equally fast: costs are not known so well. The first of them is
taken, in which ranks wait for one another least. On 24 cases nothing changes up to 2 %, and 4 % costs 0.5 % on average
(benchmarks/modes.py)."""

MEMORY_SHARE = 0.9
"""Share of a device's memory, and of a node's, that is planned with; the rest is the allocator's and the libraries'."""

SHARDING = "train.sharding"


class Mode(NamedTuple):
    """How ranks synchronise (step, micro_batch), whether activations are recomputed, and in `sync=step` whether each
    rank has parameters and gradient sums for itself (whole) or its node has them once (node)."""

    sync: str
    recomputes: bool
    sharding: str = "whole"

    def __str__(self) -> str:
        shared = f", {SHARDING}=node" if self.sharding == "node" else ""
        return f"{self.sync}{shared}{' with recomputation' if self.recomputes else ''}"


PLAIN = Mode("step", False)


@dataclass(frozen=True)
class Candidate:
    """A mode, the tokens that each rank holds in it (at most, with activations in host memory where that is admitted),
    and the seconds of the step by which modes are compared."""

    mode: Mode
    tokens_per_rank: int
    step_s: float

    def holds(self, tokens_per_rank: int) -> bool:
        return self.tokens_per_rank >= max(1, tokens_per_rank)


def equal_samples(num_sequences: int, sequence_tokens: int, merge_area: int) -> list[Sample]:
    """A batch of images alone. `merge_area`: patches of a vision token."""
    return [Sample(str(number), 0, sequence_tokens, ((1, merge_area, sequence_tokens),))
            for number in range(num_sequences)]


def held_samples(samples: Sequence[Sample], limit_tokens: int) -> list[Sample]:
    """Those of a batch that a run would train on whose sequences have so many tokens at most."""
    return [sample for sample in samples if sample.num_tokens <= limit_tokens]


def compared_step_s(
    samples: Sequence[Sample], cost: CostModel, sync: str, tokens_per_rank: int, nodes: Sequence[int],
    gather_s: float, offload: Offload = NO_OFFLOAD,
) -> float:
    """Seconds by which modes are compared: of a batch on ranks of these nodes; infinite where a sequence does not fit
    on all of them.

    `gather_s`: what a pack's (or micro-batch's) layers take to gather and to reduce, which no compute shortens; 0 where
    a rank has all of them.
    """
    longest, room = max(sample.num_tokens for sample in samples), max(tokens_per_rank, offload.tokens_per_rank)
    if tokens_per_rank < 1 or longest > room * len(nodes):
        return math.inf
    num_ranks = min(len(nodes), max(COMPARED_RANKS, math.ceil(longest / room)))
    samples = samples[:math.ceil(len(samples) * num_ranks / len(nodes))]
    cluster = ClusterSpec.of_nodes(nodes[:num_ranks], tokens_per_rank, offload=offload)
    plan = plan_batch(samples, cluster, replace(cost, group_s=0.0), planner=LAST_RESORT, sync=sync)
    return plan.predicted_time_s + _gathering_s(plan, gather_s)


def _gathering_s(plan: Plan, gather_s: float) -> float:
    """What a step takes longer, at most, where packs (or micro-batches) wait for what their layers gather."""
    times_s = np.array([group.predicted_time_s for group in plan.groups])
    if plan.sync == "micro_batch":
        longest_s = np.zeros(1 + max(group.micro_batch for group in plan.groups))
        np.maximum.at(longest_s, [group.micro_batch for group in plan.groups], times_s)
        return float(np.maximum(0.0, gather_s - longest_s).sum())
    waits_s = np.zeros(plan.cluster.num_ranks)
    for group, wait_s in zip(plan.groups, np.maximum(0.0, gather_s - times_s)):
        waits_s[list(group.ranks)] += wait_s
    return float(waits_s.max())


def choose(candidates: Sequence[Candidate], needed_tokens: int) -> Candidate:
    """The fastest of those that hold so many tokens a rank, the first of several that are (`TIE`); else the last one
    with most room: candidates come in the order of what they need, most first.
    """
    holding = [candidate for candidate in candidates if candidate.holds(needed_tokens)]
    if holding:
        least_s = min(candidate.step_s for candidate in holding)
        return next(candidate for candidate in holding if candidate.step_s <= (1 + TIE) * least_s)
    return max(reversed(candidates), key=lambda candidate: candidate.tokens_per_rank)


def reason(candidates: Sequence[Candidate], needed_tokens: int, samples: Sequence[Sample]) -> str:
    """Why `choose` takes which: what each holds and takes for a batch, in one line."""
    parts = []
    for candidate in candidates:
        if not candidate.holds(needed_tokens):
            parts.append(f"{candidate.mode} holds {candidate.tokens_per_rank:,}")
        else:
            parts.append(f"{candidate.mode} takes {candidate.step_s:.3g} s")
    lengths = sorted({sample.num_tokens for sample in samples})
    tokens = f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"
    return (f"a rank is to hold {max(1, needed_tokens):,} tokens, and a batch of {len(samples)} sequences of {tokens} "
            f"tokens is modelled: {'; '.join(parts)}")
