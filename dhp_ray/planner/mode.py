"""How a run trains where it is to choose: how its ranks synchronise, whether activations are recomputed, and where
parameters and gradient sums lie.

Of the modes in which the ranks hold the longest sequence, the one whose modelled step is shortest; where none holds
it, the one with the most room. The step by which they are compared has as many sequences a rank as the run's batch,
each as large as the largest image, in packs as large as the mode's room. So recomputation is taken where it is needed
to hold the longest sequence, or where packs are so short without it that launching kernels, exchanging keys and values
and, where a rank has no parameters of its own, gathering them cost more than computing twice. Where activations may go
to host memory, a rank holds more tokens; so that this is charged for, the step then has the longest sequence as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.offload import NO_OFFLOAD, Offload
from dhp_ray.planner.plan import ClusterSpec

LOCKSTEP = 1.04
"""`sync=micro_batch` over this step of equal sequences, for the waits at the end of each micro-batch: the most by which
`step` was shorter on mixed batches at equal memory (benchmarks/README.md), modelled."""

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


def reference_step_s(
    cost: CostModel, sync: str, tokens_per_rank: int, nodes: Sequence[int], num_sequences: int, sequence_tokens: int,
    merge_area: int, gather_s: float, offload: Offload = NO_OFFLOAD, longest_tokens: int = 0,
) -> float:
    """Seconds of the step above, with `num_sequences` sequences a rank, on ranks of these nodes; infinite where a
    sequence does not fit on all of them.

    `merge_area`: patches of a vision token; `gather_s`: what a pack's (or micro-batch's) layers take to gather and to
    reduce, which no compute shortens; 0 where a rank has all of them. `longest_tokens`: of one sequence more, which all
    ranks run; 0: there is none.
    """
    most_tokens = max(tokens_per_rank, offload.tokens_per_rank)
    if tokens_per_rank < 1 or max(sequence_tokens, longest_tokens) > most_tokens * len(nodes):
        return math.inf
    cluster = ClusterSpec.of_nodes(nodes, tokens_per_rank, offload=offload)
    degree = min(math.ceil(sequence_tokens / tokens_per_rank), cluster.num_ranks)
    fitting = max(1, tokens_per_rank // sequence_tokens)
    # a group of several ranks runs the sequences of all its members, one after the other
    counts = [fitting] * (num_sequences // fitting) + [num_sequences % fitting] * (num_sequences % fitting > 0)
    packs = [([sequence_tokens] * count, degree) for count in counts * degree]
    packs += [([longest_tokens], cluster.num_ranks)] * (longest_tokens > 0)
    found = []
    for lengths, count in packs:
        patches = sum(lengths) * merge_area
        encode_s = patches * cost.vision_linear_s / count
        found.append(cost.pack_time_s(lengths, range(count), cluster, encode_s, patches))
    if sync == "micro_batch":
        return LOCKSTEP * sum(max(time_s, gather_s) + cost.fixed_s for time_s in found)
    return sum(max(time_s, gather_s) for time_s in found) + cost.fixed_s


def choose(candidates: Sequence[Candidate], needed_tokens: int) -> Candidate:
    """The fastest of those that hold so many tokens a rank, the first of several that are; else the last one with most
    room: candidates come in the order of what they need, most first.
    """
    holding = [candidate for candidate in candidates if candidate.holds(needed_tokens)]
    if holding:
        return min(holding, key=lambda candidate: candidate.step_s)
    return max(reversed(candidates), key=lambda candidate: candidate.tokens_per_rank)


def reason(candidates: Sequence[Candidate], needed_tokens: int, num_sequences: int, sequence_tokens: int) -> str:
    """Why `choose` takes which: what each holds and takes, in one line."""
    parts = []
    for candidate in candidates:
        if not candidate.holds(needed_tokens):
            parts.append(f"{candidate.mode} holds {candidate.tokens_per_rank:,}")
        else:
            parts.append(f"{candidate.mode} takes {candidate.step_s:.3g} s")
    return (f"a rank is to hold {max(1, needed_tokens):,} tokens, and a step of {num_sequences} sequences of "
            f"{sequence_tokens:,} tokens a rank is modelled: {'; '.join(parts)}")
