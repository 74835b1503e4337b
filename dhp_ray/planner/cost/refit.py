"""Fits the constants of compute to the measured packs of a run.

For each part of a pack that a rank ran (`work.py`):

    seconds = slowness of the rank * sum over terms of factor * constant * amount

Constants are those that the run began with (the prior). The unknowns are one factor for each term, and the slowness of
each rank, solved by turns: if a rank takes longer for all of its packs, that is no cost. The typical rank (the lower
median, as for speeds) has slowness 1, and so has every rank near it. Then for the factors f, with weights w that reduce
the influence of outliers (Huber):

    least   sum w (predicted / (seconds / slowness) - 1)^2  +  (sigma / TAU)^2 sum (f / g - 1)^2

g is the common factor by which all terms are off, and sigma the typical error. So terms that the packs cannot separate
move together, and a term that no pack has stays. A refit changes a factor by at most STEP, and all refits together by
at most FAR. It is used if it lowers the typical error by a tenth and by half a percent; otherwise plans would follow
noise. Memory is not refitted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.work import TERMS, constants_of

LOW, FREE, HIGH = -1, 0, 1
RIDGE = 1e-12
"""Share of the largest diagonal element; it makes the solution unique if columns are equal."""


def weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """The value whose weighted distance to all values is least."""
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, sums[-1] / 2)])


def bounded_least_squares(
    matrix: np.ndarray, target: np.ndarray, low: np.ndarray | float = 0.0, high: np.ndarray | float = np.inf
) -> np.ndarray:
    """The x (n,) within the bounds for which `matrix` (m, n) times x is nearest to `target` (m,).

    Each unknown is free or at a bound. A free unknown outside of its bounds goes
    to the nearer bound. An unknown at a bound is freed if the sum decreases inside. If several are wrong, the last one
    changes (Murty's rule, which ends if A's columns are independent). Two unknowns, bounds 0 and 1:

        free: (1.4, -0.2), the last wrong one, x2, to 0 | x1 alone: 1.3, to 1 | x2 would not grow: done

    For a column of zeros, which says nothing, x is the bound nearest to 0.
    """
    num = matrix.shape[1]
    low, high = (np.broadcast_to(np.asarray(bound, dtype=np.float64), num) for bound in (low, high))
    scale = np.sqrt((matrix * matrix).sum(axis=0))
    known = scale > 0
    scale = np.where(known, scale, 1.0)
    columns = matrix / scale
    gram, moment = columns.T @ columns, columns.T @ target
    gram[np.diag_indices(num)] += RIDGE + ~known
    low, high = low * scale, high * scale
    place = np.full(num, FREE)
    x = np.zeros(num)
    for _ in range(4**num):
        free = place == FREE
        x = np.where(place == LOW, low, np.where(place == HIGH, high, 0.0))
        if free.any():
            x[free] = np.linalg.solve(gram[np.ix_(free, free)], (moment - gram @ x)[free])
        slope = gram @ x - moment
        slack = 1e-12 * np.maximum(1.0, np.abs(moment))
        wrong = np.where(free, (x < low) | (x > high), np.where(place == LOW, slope < -slack, slope > slack))
        if not wrong.any():
            break
        last = int(np.flatnonzero(wrong)[-1])
        place[last] = FREE if not free[last] else (LOW if x[last] < low[last] else HIGH)
    return np.clip(x, low, high) / scale


STEP, FAR = 2.0, 100.0
TAU = 1.0
LEAST_SIGMA = 0.02
HUBER = 1.5
"""Errors beyond this many sigma count linearly, not squared."""
ROUNDS = 12
NEAR = 1.18
"""Ranks that are less than this slower than the typical one count as equally fast, as for speeds (`SpeedMeter`)."""
FEWEST = 12
"""The fewest rows of packs for a refit."""
WORTH, WORTH_SHARE = 0.005, 0.1


class Observed(NamedTuple):
    """Rows of packs: the rank that ran each, `amounts` (rows, TERMS), seconds without waiting, and the weight of each
    row.
    """

    rank: np.ndarray
    amounts: np.ndarray
    seconds: np.ndarray
    weight: np.ndarray

    def usable(self) -> Observed:
        """Without rows that no rank has reported, or in which nothing was computed."""
        return self.of(np.isfinite(self.seconds) & (self.seconds > 0) & (self.amounts.sum(axis=1) > 0))

    def of(self, kept: np.ndarray) -> Observed:
        return Observed(*(array[kept] for array in self))


class Refit(NamedTuple):
    """Factors by term for the prior's constants, and the typical error of all rows before and after: 1.0 if they are
    predicted twice, or half, of what they take.
    """

    factors: dict[str, float]
    error_before: float
    error_after: float


def refit(prior: CostModel, factors: dict[str, float], observed: Observed) -> Refit | None:
    """New factors, starting from those in force (missing ones are 1); None if the rows give no reason to change."""
    rows = observed.usable()
    rows = rows.of(rows.amounts @ constants_of(prior) > 0)  # without a price nothing can be scaled
    if len(rows.seconds) < FEWEST:
        return None
    parts = rows.amounts * constants_of(prior)  # seconds of each term under the prior
    now = np.array([factors.get(name, 1.0) for name in TERMS])
    seen = parts.any(axis=0)
    low, high = np.maximum(now / STEP, 1 / FAR), np.minimum(now * STEP, FAR)
    found, slowness = now.copy(), slowness_of(rows, parts @ now)
    error_before = _typical_error(parts @ now, rows.seconds / slowness, rows.weight)
    for _ in range(ROUNDS):
        nominal = rows.seconds / slowness
        relative = parts[:, seen] / nominal[:, None]
        off = np.abs(relative @ found[seen] - 1.0)
        sigma = max(LEAST_SIGMA, 1.4826 * weighted_median(off, rows.weight))
        weight = np.sqrt(rows.weight * np.minimum(1.0, HUBER * sigma / np.maximum(off, 1e-12)))
        together = 1.0 / max(1e-12, weighted_median(relative.sum(axis=1), rows.weight))
        pull = sigma / TAU
        matrix = np.vstack([relative * weight[:, None], np.eye(int(seen.sum())) * pull / together])
        target = np.concatenate([weight, np.full(int(seen.sum()), pull)])
        found[seen] = bounded_least_squares(matrix, target, low[seen], high[seen])
        slowness = slowness_of(rows, parts @ found)
    error_after = _typical_error(parts @ found, rows.seconds / slowness, rows.weight)
    if error_before - error_after < max(WORTH, WORTH_SHARE * error_before):
        return None
    return Refit(dict(zip(TERMS, found.tolist())), error_before, error_after)


def with_factors(prior: CostModel, factors: dict[str, float]) -> CostModel:
    """The cost in force."""
    changed = {name: getattr(prior, name) * factor for name, factor in factors.items()}
    return replace(prior, **changed) if changed else prior  # type: ignore[arg-type]


def slowness_of(rows: Observed, predicted: np.ndarray) -> np.ndarray:
    """The slowness of each row's rank: the factor by which its packs take longer than those of the typical rank."""
    ratio = rows.seconds / np.maximum(predicted, 1e-12)
    ranks, place = np.unique(rows.rank, return_inverse=True)
    medians = np.array([weighted_median(ratio[place == number], rows.weight[place == number])
                        for number in range(len(ranks))])
    typical = np.sort(medians)[(len(medians) - 1) // 2]
    slower = medians / typical
    return np.where(slower > NEAR, slower, 1.0)[place]


def _typical_error(predicted: np.ndarray, seconds: np.ndarray, weight: np.ndarray) -> float:
    """By how much rows are off, either way: a prediction that is far too low has a large error too."""
    ratio = np.maximum(predicted, 1e-12) / seconds
    return weighted_median(np.maximum(ratio, 1.0 / ratio) - 1.0, weight)
