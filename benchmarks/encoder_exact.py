"""How evenly images can be dealt out whole, by OR-tools CP-SAT (in the dev extra).

There are two exact models. The first takes a limit and asks how many ranks are filled by each pattern (so many images
of each size, and no further image fits beside them); bisection finds the limits that are proven too short. The second
says how many images of each size are on each rank and minimizes the end of the fullest one. The first model proves more
where many images are alike, the second where images are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

TICKS = 10**7
"""Ticks of the model's clock in the largest image."""

PATTERNS, FEW, LIMIT_S = 20_000, 40, 20.0
"""Patterns of the first model, images of the second, and seconds for one model, at most; beyond, nothing is proven."""

TOLERANCE = 1e-3
"""The bisection ends when limits differ by this share."""


def least_s(image_s: np.ndarray, num_ranks: int) -> float:
    """The mean of equal ranks, or the largest image."""
    return float(max(image_s.sum() / num_ranks, image_s.max()))


def proven_s(image_s: np.ndarray, num_ranks: int, found_s: float) -> float:
    """Seconds below which the fullest rank of no assignment is, as far as the solver proves that; `found_s` is that of
    one assignment."""
    short_s, long_s = least_s(image_s, num_ranks), found_s
    while long_s - short_s > TOLERANCE * long_s:
        middle_s = (short_s + long_s) / 2
        too_short = fit(image_s, num_ranks, middle_s) is False
        short_s, long_s = (middle_s, long_s) if too_short else (short_s, middle_s)
    if found_s - short_s <= TOLERANCE * found_s or len(image_s) > FEW:
        return short_s
    return max(short_s, assigned_s(image_s, num_ranks))


def assigned_s(image_s: np.ndarray, num_ranks: int) -> float:
    """The same by the second model."""
    from ortools.sat.python import cp_model

    sizes, counts, tick_s = in_ticks(image_s)
    model, total = cp_model.CpModel(), sum(size * count for size, count in zip(sizes, counts))
    fullest = model.new_int_var(max(sizes), total, "")
    ranks = [[model.new_int_var(0, count, "") for count in counts] for _ in range(num_ranks)]
    for place, count in enumerate(counts):
        model.add(sum(rank[place] for rank in ranks) == count)
    loads = [sum(size * number for size, number in zip(sizes, rank)) for rank in ranks]
    for load, following in zip(loads, [*loads[1:], 0]):  # ranks are alike: the fullest comes first
        model.add(load <= fullest)
        model.add(load >= following)
    model.minimize(fullest)
    return float(solved(model)[1] * tick_s)


def fit(image_s: np.ndarray, num_ranks: int, limit_s: float) -> bool | None:
    """Whether the images fit onto equal ranks within a limit; None where that is not known."""
    from ortools.sat.python import cp_model

    sizes, counts, tick_s = in_ticks(image_s)
    found: list[tuple[int, ...]] = []
    for pattern in patterns(sizes, counts, int(limit_s / tick_s)):
        found.append(pattern)
        if len(found) > PATTERNS:
            return None
    model = cp_model.CpModel()
    ranks = [model.new_int_var(0, num_ranks, "") for _ in found]
    model.add(sum(ranks) <= num_ranks)
    for place, count in enumerate(counts):
        model.add(sum(pattern[place] * used for pattern, used in zip(found, ranks) if pattern[place]) >= count)
    return {"OPTIMAL": True, "FEASIBLE": True, "INFEASIBLE": False}.get(solved(model)[0])


def in_ticks(image_s: np.ndarray) -> tuple[list[int], list[int], float]:
    """(sizes of images, falling; how many there are of each; seconds of a tick), rounded down: what does not fit in a
    model does not fit at all."""
    tick_s = float(image_s.max() / TICKS)
    sizes, counts = np.unique(np.floor(image_s / tick_s).astype(int), return_counts=True)
    return sizes[::-1].tolist(), counts[::-1].tolist(), tick_s


def solved(model: Any) -> tuple[str, float]:
    """(name of the status, bound of the objective) after the solver's time."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = LIMIT_S
    solver.parameters.num_workers = 8  # its ways to prove
    return solver.status_name(solver.solve(model)), solver.best_objective_bound


def patterns(sizes: Sequence[int], counts: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
    """Images of each size (falling) that fill the room, so that no further one fits."""
    if not sizes:
        yield ()
        return
    most = min(counts[0], room // sizes[0])
    for count in range(most, -1, -1):
        left = room - count * sizes[0]
        for rest in patterns(sizes[1:], counts[1:], left):
            remains = left - sum(size * number for size, number in zip(sizes[1:], rest))
            if count == counts[0] or remains < sizes[0]:
                yield (count, *rest)
