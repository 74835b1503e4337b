"""Fits the constants of compute anew to what the packs of a run took.

Of each part of a pack that a rank ran (`planner/work.py`):

    seconds = slowness of the rank * sum over terms of factor * constant * amount

Constants are the prior's, those that the run began with; factors, one a term, are what is looked for, and the slowness
of ranks with them, by turns: what a rank takes longer for all of its packs is no cost. The typical rank (the lower
median, as of speeds) has slowness 1, and so has whoever is near it. Then for the factors f, with weights w that make
little of outliers (Huber):

    least   sum w (predicted / (seconds / slowness) - 1)^2  +  (sigma / TAU)^2 sum (f / g - 1)^2

g is the factor by which all terms together are off, and sigma the typical error. So terms that the packs cannot tell
apart move together, and a term that no pack has stays. A refit moves a factor by STEP at most, and all of them together
by FAR. It is taken where it lowers the typical error by a tenth, and by half a percent, or else plans would follow
noise. Memory is none of this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.least_squares import bounded_least_squares, weighted_median
from dhp_ray.planner.work import TERMS, constants_of

STEP, FAR = 2.0, 100.0
TAU = 1.0
LEAST_SIGMA = 0.02
HUBER = 1.5
"""Errors beyond so many sigma count with their size, not with its square."""
ROUNDS = 12
NEAR = 1.18
"""Ranks that are slower than the typical one by less have its speed: as for speeds (`SpeedMeter`)."""
FEWEST = 12
"""Rows of packs that a refit needs."""
WORTH, WORTH_SHARE = 0.005, 0.1


class Observed(NamedTuple):
    """Rows of packs: the rank that ran each, `amounts` (rows, TERMS), seconds that were not spent waiting, and how much
    each counts.
    """

    rank: np.ndarray
    amounts: np.ndarray
    seconds: np.ndarray
    weight: np.ndarray

    def usable(self) -> Observed:
        """Without rows that nobody has reported, or in which nothing was computed."""
        kept = np.isfinite(self.seconds) & (self.seconds > 0) & (self.amounts.sum(axis=1) > 0)
        return Observed(*(array[kept] for array in self))


class Refit(NamedTuple):
    """Factors by term for the prior's constants, and the typical relative error of all rows before and after."""

    factors: dict[str, float]
    error_before: float
    error_after: float


def refit(prior: CostModel, factors: dict[str, float], observed: Observed) -> Refit | None:
    """New factors, from those in force (missing ones are 1); None where the rows give no reason for any."""
    rows = observed.usable()
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
    """Of each row the slowness of its rank: by how much its packs take longer than those of the typical rank."""
    ratio = rows.seconds / np.maximum(predicted, 1e-12)
    ranks, place = np.unique(rows.rank, return_inverse=True)
    medians = np.array([weighted_median(ratio[place == number], rows.weight[place == number])
                        for number in range(len(ranks))])
    typical = np.sort(medians)[(len(medians) - 1) // 2]
    slower = medians / typical
    found: np.ndarray = np.where(slower > NEAR, slower, 1.0)[place]
    return found


def _typical_error(predicted: np.ndarray, seconds: np.ndarray, weight: np.ndarray) -> float:
    return weighted_median(np.abs(predicted / seconds - 1.0), weight)
