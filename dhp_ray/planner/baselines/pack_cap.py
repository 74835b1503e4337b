"""The pack cap of a baseline: how many tokens of a pack a rank takes, at most what its memory holds.

Packing to the memory limit makes few long packs, which leave ranks waiting. Whoever uses a baseline tunes that one
number, so the baselines do: caps are tried, and the one whose schedule the cost model finds shortest is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule

LADDER, ROUNDS, NEIGHBOURS = 9, 5, 8
"""Caps tried: on a ladder from the shortest sequence to memory; such that the batch takes so many rounds of packs;
around the best of these."""


def capacities(tokens: np.ndarray, degree: int | np.ndarray, cap: int) -> np.ndarray:
    """Tokens of a pack that each sequence may open, on `degree` ranks: those of the cap, or the sequence's own where
    it is longer."""
    return np.maximum(tokens, degree * cap)


def degrees_at(tokens: np.ndarray, cap: int, num_ranks: int) -> np.ndarray:
    """The fewest ranks that hold each sequence (or pack) with at most `cap` tokens a rank, or all ranks."""
    degrees: np.ndarray = np.minimum(-(-tokens // cap), num_ranks)
    return degrees


def powers_of_two(degrees: np.ndarray, num_ranks: int) -> np.ndarray:
    """The next powers of two, or all ranks."""
    powers: np.ndarray = np.minimum(2 ** np.ceil(np.log2(degrees)).astype(np.int64), num_ranks)
    return powers


def cap_of_rounds(problem: Problem, memory: int, more: int) -> float:
    """The cap under which the batch takes so many rounds of packs more than under memory's; where there are many of
    them, memory's."""
    each = int(problem.items.tokens.sum()) / problem.cluster.num_ranks
    return min(memory, 1.02 * each / (int(each // memory) + 1 + more))


def best_cap(problems: Sequence[Problem], schedule_at: Callable[[Problem, int], Schedule]) -> tuple[float, int]:
    """(seconds of all batches under the best cap, that cap): `schedule_at` plans a batch at a cap. Memory's cap wins
    where no other is shorter."""
    found: dict[int, float] = {}

    def try_all(caps: Sequence[int]) -> int:
        for cap in caps:
            if cap not in found:
                found[cap] = sum(time_of(problem, schedule_at(problem, cap)) for problem in problems)
        return min(found, key=lambda cap: found[cap])

    best = try_all(_coarse_caps(problems))
    tried = sorted(found)
    place = tried.index(best)
    around = np.geomspace(tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)], NEIGHBOURS + 2)
    best = try_all(sorted({int(cap) for cap in around}, reverse=True))
    return found[best], best


def tuned(problem: Problem, schedule_at: Callable[[Problem, int, int], Schedule]) -> Schedule:
    """The shortest schedule over all caps of packs, with minimum degrees from memory, or from the same cap.
    `schedule_at` plans with a cap of each."""
    memory = problem.cluster.tokens_per_rank
    packs_s, cap = best_cap([problem], lambda problem, cap: schedule_at(problem, cap, memory))
    both_s, both = best_cap([problem], lambda problem, cap: schedule_at(problem, cap, cap))
    return schedule_at(problem, cap, memory) if packs_s <= both_s else schedule_at(problem, both, both)


def _coarse_caps(problems: Sequence[Problem]) -> list[int]:
    """Memory's first, then falling."""
    memory = min(problem.cluster.tokens_per_rank for problem in problems)
    shortest = min(memory, *(int(problem.items.tokens.min()) for problem in problems))
    caps = np.geomspace(shortest, memory, LADDER).tolist()
    # batches of a data set are alike: the first one's rounds do for all
    caps += [cap_of_rounds(problems[0], memory, more) for more in range(ROUNDS)]
    return [memory, *sorted({int(cap) for cap in caps if 1 <= int(cap) < memory}, reverse=True)]
