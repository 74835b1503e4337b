"""The ways in which a batch is planned whose packs may move activations to host memory or recompute layers.

A rank that holds 1,000 tokens with all activations, and 8,000 if all layers are recomputed:

    as it is            single sequences on the fewest ranks that hold them, 8,000 tokens on each; several are joined up
                        to 1,000
    nothing recomputed  enough ranks for each sequence that no rank has more than 1,000 tokens
    packs of 2,000, 4,000, 8,000       every pack recomputes as much as one of that many tokens needs: 0.57, 0.86, 1
    joined up to 8,000                 as the first one, but packs of several are joined up to 8,000; in micro_batch,
                                       and for a small batch only

In the ways with packs of 2,000 and more the seconds of a pack are the sum of its sequences', as searches expect. In the
plan each pack then recomputes no more than it must, and takes no longer. Such a way is planned only if its bound is
below the best plan.

In a small batch one pack more may mean one micro-batch more. So there is one more way, in which a pack that grows
recomputes a little more: sequences of 1,010 and 100 tokens on one rank are then one micro-batch, whose pack recomputes
0.11 of its layers. Searches expect the seconds of a pack to be a sum, so this way alone would not do.

With offload there are the first two ways (then no pack waits for copies) and the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.bound import lower_bound_s
from dhp_ray.planner.layer_share import Recomputation
from dhp_ray.planner.problem import Problem

SMALL = 10_000
"""Sequences x ranks of a small batch."""

FULLER = (2, 4)
"""Packs that recompute layers are tried with so many times the tokens that fit without, and with the most."""


def at_cheap_tokens(problem: Problem) -> list[Problem]:
    """The batch in one or two ways: as it is, if that differs from the other; and with enough ranks (or all) for each
    sequence that no rank has more than `cheap_tokens`. If all sequences fit in this way, packs are no larger either; if
    every pack that moves activations would wait, or with recomputation, that is the batch as it is without any.
    """
    cluster, limit = problem.cluster, problem.machine.tokens_per_rank
    if limit == cluster.most_tokens_per_rank:
        return [problem]
    items = problem.items.copy()  # type: ignore[attr-defined]
    degrees = -(-items.tokens // limit)
    items.minimum_degree = np.minimum(degrees, cluster.num_ranks)
    differs = bool((items.minimum_degree > problem.items.minimum_degree).any())
    if degrees.max() <= cluster.num_ranks:
        cluster = replace(cluster, offload=cluster.offload.up_to(limit),
                          recomputation=cluster.recomputation.up_to(limit))
    elif not differs:
        return [problem]
    return [*([problem] if differs else []), replace(problem, cluster=cluster, items=items)]


def with_fuller_packs(problem: Problem) -> Iterator[Problem]:
    """The batch with packs of more tokens, each of which recomputes as many layers as the largest of them must."""
    cluster, recomputation = problem.cluster, problem.cluster.recomputation
    held, most = cluster.tokens_per_rank, recomputation.tokens_per_rank
    for tokens in [*(factor * held for factor in FULLER if factor * held < most), most] if recomputation.share else []:
        if problem.items.tokens.max() <= tokens * cluster.num_ranks:
            items = problem.items.copy()  # type: ignore[attr-defined]
            items.minimum_degree = -(-items.tokens // tokens)
            share = float(recomputation.share_of(tokens))
            way = replace(problem, items=items, cluster=replace(
                cluster, tokens_per_rank=tokens, recomputation=Recomputation(share, 0, tokens)))
            yield replace(way, lower_bound_s=lower_bound_s(way))


class Way(NamedTuple):
    """A batch as searches see it, and as exchanges between the packs of their schedules do."""

    searched: Problem
    exchanged: Problem


def ways_of(problem: Problem) -> Iterator[Way]:
    """All ways to plan a batch, each with a lower bound of what its search may find."""
    cluster = problem.cluster
    yield from (Way(way, way) for way in at_cheap_tokens(problem))
    yield from (Way(way, problem) for way in with_fuller_packs(problem))
    joins = problem.machine.tokens_per_rank < cluster.most_tokens_per_rank and (
        cluster.offload.share > 0 or problem.sync == "micro_batch")
    if joins and len(problem.samples) * cluster.num_ranks <= SMALL:
        yield Way(replace(problem, joins_most=True), problem)


def few_ways(problem: Problem, as_it_is: bool = False) -> Iterator[Way]:
    """The ways to plan a batch for which there is little time: as always without recomputation; with it as with nothing
    recomputed, of those with fuller packs the one with the lowest bound, and first, if asked for, as it is.
    """
    if not problem.cluster.recomputation.share:
        yield from (Way(way, way) for way in at_cheap_tokens(problem))
        return
    *given, cheap = at_cheap_tokens(problem)
    if as_it_is:
        yield from (Way(way, way) for way in given)
    cheap = replace(cheap, lower_bound_s=lower_bound_s(cheap))
    yield Way(cheap, cheap)
    if fuller := list(with_fuller_packs(problem)):
        yield Way(min(fuller, key=lambda way: way.lower_bound_s), problem)
