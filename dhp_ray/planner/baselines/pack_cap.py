"""The pack cap of a baseline: the most tokens of a pack that a rank takes. It is at most what the rank's memory holds.

Packing to the memory limit makes few long packs, which leave ranks waiting. Users of a baseline would tune this number,
so the baselines tune it here: several caps are tried, and the one with the shortest predicted schedule is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.timeline import time_of

LADDER, ROUNDS, NEIGHBOURS = 9, 5, 8
"""Numbers of caps that are tried: on a ladder from the shortest sequence to the memory limit; for numbers of rounds
of packs (`cap_of_rounds`); and around the best of these.
"""


def capacities(tokens: np.ndarray, degree: int | np.ndarray, cap: int) -> np.ndarray:
    """Capacity in tokens of a pack that each sequence opens on `degree` ranks: `degree` times the cap, or the length of
    the sequence if that is more.
    """
    return np.maximum(tokens, degree * cap)


def degrees_at(tokens: np.ndarray, cap: int, num_ranks: int) -> np.ndarray:
    """The fewest ranks that hold each sequence (or pack) with at most `cap` tokens a rank, or all ranks."""
    return np.minimum(-(-tokens // cap), num_ranks)


def powers_of_two(degrees: np.ndarray, num_ranks: int) -> np.ndarray:
    """The next power of two of each degree, or all ranks."""
    return np.minimum(2 ** np.ceil(np.log2(degrees)).astype(np.int64), num_ranks)


def cap_of_rounds(problem: Problem, memory: int, more: int) -> float:
    """The cap with which the batch takes `more` additional rounds of packs, compared with the cap `memory`; if there
    are many rounds, `memory` itself.
    """
    each = int(problem.items.tokens.sum()) / problem.cluster.num_ranks
    return min(memory, 1.02 * each / (int(each // memory) + 1 + more))


def best_cap(problems: Sequence[Problem], schedule_at: Callable[[Problem, int], Schedule]) -> tuple[float, int]:
    """(seconds of all batches under the best cap, that cap). `schedule_at` plans a batch with a cap. The memory limit
    is kept if no other cap is shorter.
    """
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
    """The shortest schedule over all caps of packs, with minimum degrees that follow from memory or from the same cap.
    `schedule_at` plans a batch with a cap for packs and a cap for degrees.
    """
    memory = problem.cluster.tokens_per_rank
    packs_s, cap = best_cap([problem], lambda problem, cap: schedule_at(problem, cap, memory))
    both_s, both = best_cap([problem], lambda problem, cap: schedule_at(problem, cap, cap))
    return schedule_at(problem, cap, memory) if packs_s <= both_s else schedule_at(problem, both, both)


def _coarse_caps(problems: Sequence[Problem]) -> list[int]:
    """The memory limit first, then smaller caps in descending order."""
    memory = min(problem.cluster.tokens_per_rank for problem in problems)
    shortest = min(memory, *(int(problem.items.tokens.min()) for problem in problems))
    caps = np.geomspace(shortest, memory, LADDER).tolist()
    # the batches of a data set are similar: the rounds of the first one serve for all
    caps += [cap_of_rounds(problems[0], memory, more) for more in range(ROUNDS)]
    return [memory, *sorted({int(cap) for cap in caps if 1 <= int(cap) < memory}, reverse=True)]
