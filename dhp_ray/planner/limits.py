"""The best that each number of ranks can do, from which the lower bound is made (`bound.py`)."""

from __future__ import annotations

from typing import Protocol, TypeAlias, cast

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.rates import Number, OverlapOf

LIMIT = np.dtype(
    [
        (name, np.float64)
        for name in ("speed", "encode_speed", "transfer_s", "overlap", "overhead_s", "encoder_pass_s", "least_s",
                     "charge_s", "kept_charge_s", "exchange_s", "stretch", "moved", "again", "most_again",
                     "encoded_again", "from_tokens", "free_tokens", "forward")
    ]
)
"""The best that d ranks can do. `speed`: that of the d-th fastest rank. `encode_speed`: the sum of the d fastest (of
all ranks, if images may be encoded apart).

On d ranks or more: `charge_s` is the least area in seconds that a token adds to its compute, `kept_charge_s` if nothing
is recomputed; `exchange_s` is the same without fixed costs of packs. `most_again`: what the largest pack computes again
for each second. `stretch` is the least area over compute, which is 1 except with unequal speeds, where a group is as
slow as its slowest member.
"""


class LimitOf(OverlapOf[Number], Protocol[Number]):
    """The fields of LIMIT: numbers of one record, arrays of many."""

    speed: Number
    encode_speed: Number
    transfer_s: Number
    encoder_pass_s: Number
    charge_s: Number
    kept_charge_s: Number
    most_again: Number
    exchange_s: Number
    stretch: Number


Limit: TypeAlias = LimitOf[float]


class Limits(LimitOf[np.ndarray], Protocol):
    """A numpy.recarray of LIMIT, one for each number of ranks from 0 (unused) to N."""

    def __len__(self) -> int: ...
    def __getitem__(self, num_ranks: int) -> Limit: ...


STRETCHED = 64
"""Number of ranks in the largest set that is examined."""


def limits_of(problem: Problem) -> Limits:
    """The limits of a cluster with its costs."""
    cluster, rates = problem.cluster, problem.machine.rates
    fastest = np.sort(problem.speeds)[::-1]
    degrees = np.arange(cluster.num_ranks + 1)
    limits = cast(Limits, np.recarray(len(degrees), dtype=LIMIT))
    limits.speed = fastest[np.maximum(degrees, 1) - 1]
    limits.encode_speed = np.concatenate([[1.0], np.cumsum(fastest)])
    if problem.encoder != "group":
        limits.encode_speed[1:] = fastest.sum()
    limits.transfer_s = np.where(
        degrees > cluster.ranks_per_node, rates.across_s, np.minimum(rates.inside_s, rates.across_s)
    )
    limits.overlap, limits.overhead_s, limits.least_s = rates.overlap, rates.overhead_s, rates.least_s
    limits.encoder_pass_s = rates.encoder_pass_s
    for name in ("moved", "again", "encoded_again", "from_tokens", "free_tokens", "forward"):
        setattr(limits, name, getattr(rates, name))
    if problem.encoder != "group":  # packs then run no image again
        limits.encoded_again[:] = 0.0
    slowest_sum = np.concatenate([[0.0], np.cumsum(fastest[::-1])])
    exchange = (0.0 if rates.overlap.any() else 1.0) * limits.transfer_s * slowest_sum
    again = cluster.recomputation
    kept_tokens = again.free_tokens or cluster.most_tokens_per_rank
    charge, kept_charge = (exchange + rates.overhead_s * slowest_sum / (tokens * np.maximum(degrees, 1))
                           for tokens in (cluster.most_tokens_per_rank, kept_tokens))
    limits.exchange_s, limits.charge_s, limits.kept_charge_s = (
        np.concatenate([[0.0], np.minimum.accumulate(each[:0:-1])[::-1]]) for each in (exchange, charge, kept_charge)
    )
    limits.most_again = np.full(len(degrees), again.share * problem.cost.forward)
    limits.stretch = np.ones(len(degrees)) if fastest[0] == fastest[-1] else _stretch(fastest)
    return limits


@compiled
def _stretch(fastest: np.ndarray) -> np.ndarray:
    """For d ranks or more: the least of (sum of speeds) / (d * slowest speed) over all sets. The best sets are
    neighbours by speed.

    It never decreases with d: a set of d + 1 without its fastest rank has a lower value. So beyond STRETCHED ranks the
    value of STRETCHED is a valid bound. O(N STRETCHED).
    """
    num_ranks = len(fastest)
    stretch = np.ones(num_ranks + 1)
    for degree in range(1, num_ranks + 1):
        if degree > STRETCHED:
            stretch[degree] = stretch[STRETCHED]
            continue
        best, total = np.inf, 0.0
        for last in range(num_ranks):
            total += fastest[last]
            if last >= degree:
                total -= fastest[last - degree]
            if last >= degree - 1:
                best = min(best, total / (degree * fastest[last]))
        stretch[degree] = best
    return np.maximum(stretch * (1 - 1e-12), 1.0)
