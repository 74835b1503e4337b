"""How many tokens a rank packs may hold, where larger packs recompute layers or copy activations to host memory.

A rank that holds 1,000 tokens with all activations, and 8,000 if all layers are recomputed:

    nothing relieved   enough ranks for each sequence that no rank has more than 1,000 tokens
    as it is           single sequences on any ranks that hold them, several together up to 1,000 tokens
    packs of 8,000, 4,000, 2,000       every pack recomputes as much as one of that many tokens needs: 1, 0.86, 0.57
    joined             a pack that grows is relieved of a little more

So the seconds of a pack are the sum of its sequences', as constructors expect. In the plan each pack then recomputes no
more than it must. The improver, too, times each pack by what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dhp_ray.planner.bound import lower_bound_s
from dhp_ray.planner.plan.cluster import Recomputation
from dhp_ray.planner.problem import Problem

FULLER = (4, 2)
"""Packs that recompute layers are tried with so many times the tokens that fit without, and with the most."""


def ways_of(problem: Problem) -> Iterator[Problem]:
    """The batch with packs of several sizes; as it is, if packs are relieved of nothing."""
    cluster, cheap, most = problem.cluster, problem.machine.tokens_per_rank, problem.cluster.most_tokens_per_rank
    if cheap == most:
        yield problem
        return
    yield _up_to(problem, cheap)
    yield problem
    held, recomputation = cluster.tokens_per_rank, cluster.recomputation
    sizes = [most, *(factor * held for factor in FULLER if factor * held < most)] if recomputation.share else []
    for tokens in sizes:
        if problem.items.tokens.max() <= tokens * cluster.num_ranks:
            share = float(recomputation.share_of(tokens))
            yield _up_to(replace(problem, cluster=replace(
                cluster, tokens_per_rank=tokens, recomputation=Recomputation(share, 0, tokens))), tokens)
    yield replace(problem, joins_most=True)


def _up_to(problem: Problem, tokens: int) -> Problem:
    """The batch with at most so many tokens a rank, or all ranks for a sequence that needs more."""
    items, cluster = problem.items.copy(), problem.cluster  # type: ignore[attr-defined]
    degrees = -(-items.tokens // tokens)
    items.minimum_degree = np.maximum(items.minimum_degree, np.minimum(degrees, cluster.num_ranks))
    if degrees.max() <= cluster.num_ranks:
        cluster = replace(cluster, offload=cluster.offload.up_to(tokens),
                          recomputation=cluster.recomputation.up_to(tokens) if cluster.recomputation.free_tokens
                          else cluster.recomputation)
    way = replace(problem, items=items, cluster=cluster)
    return replace(way, lower_bound_s=lower_bound_s(way))
