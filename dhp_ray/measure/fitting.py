"""Fits a cost's constants to what packs took, with intervals and errors.

Every constant is at least 0, and errors count relative to what was measured: a short pack as much as a long one. What
is further off than OUTLYING times the typical error is left out and counted. Intervals are those of RESAMPLED fits to
measurements that are drawn anew, with repetition (bootstrap, Efron 1979), always the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dhp_ray.measure.observations import MeasureError, Observations, PackSeconds
from dhp_ray.planner.least_squares import bounded_least_squares, weighted_median
from dhp_ray.planner.work import TERMS

OUTLYING = 6.0
RESAMPLED = 200
CONFIDENCE = (0.025, 0.975)
SPARE = 3
"""Packs that must be measured beyond one for each constant."""

Interval = tuple[float, float]


BLOCKS = (0.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
"""Keys that an attention kernel may take at a time; the number with the least error is taken."""


class Fit(NamedTuple):
    """Constants, their 95 % intervals, and the mean relative error of each: over all measurements, by the share that
    the constant has in them. `block`: attention_block; `predicted` and `measured`: seconds of each measurement;
    `left_out`: how many were.
    """

    constants: dict[str, float]
    intervals: dict[str, Interval]
    errors: dict[str, float]
    predicted: np.ndarray
    measured: np.ndarray
    left_out: int = 0
    block: float = 0.0

    def seconds(self, pack: PackSeconds) -> float:
        """What a pack's compute takes by this fit."""
        return float(pack.amounts_at(self.block) @ np.array(list(self.constants.values())))

    @property
    def relative_errors(self) -> np.ndarray:
        found: np.ndarray = np.abs(self.predicted / self.measured - 1.0)
        return found


def fit_compute(packs: Sequence[PackSeconds]) -> Fit:
    """The constants of compute (`planner/work.py`), from packs on single ranks.

    Raises:
        MeasureError: too few packs to tell the constants apart, or packs that take no longer for more tokens.
    """
    fits = [_fit_at(block, packs) for block in BLOCKS]
    best = min(fits, key=lambda fit: float(np.mean(fit.relative_errors)))
    if best.constants["quadratic_s"] + best.constants["linear_s"] == 0.0:
        raise MeasureError(f"{len(packs)} packs were measured, and those of more tokens took no longer; allowed: "
                           "packs that do, as on a machine that others use less")
    return best


def _fit_at(block: float, packs: Sequence[PackSeconds]) -> Fit:
    """With so many keys at a time."""
    amounts = np.array([pack.amounts_at(block) for pack in packs]).reshape(-1, len(TERMS))
    seconds = np.array([pack.busy_s for pack in packs])
    used = np.any(amounts > 0, axis=0)
    distinct = len(np.unique(amounts, axis=0))
    if distinct < used.sum() + SPARE:
        raise MeasureError(f"{distinct} different packs were measured; allowed: at least {int(used.sum()) + SPARE} for "
                           f"the {int(used.sum())} constants {', '.join(np.array(TERMS)[used])}")
    solved = bounded_least_squares(amounts / seconds[:, None], np.ones(len(seconds)))
    off = np.abs(amounts @ solved / seconds - 1.0)
    kept = off <= max(OUTLYING * float(np.median(off)), 0.1)
    matrix = amounts[kept] / seconds[kept, None]
    solved = bounded_least_squares(matrix, np.ones(len(matrix)))
    resampled = resample(len(matrix), lambda rows: bounded_least_squares(matrix[rows], np.ones(len(rows))))
    errors = _errors(amounts, solved, seconds)[used]
    return Fit(dict(zip(TERMS, solved.tolist())),
               {name: interval(resampled[:, place]) for place, name in enumerate(TERMS)},
               dict(zip(np.array(TERMS)[used].tolist(), errors.tolist())), amounts @ solved, seconds,
               int((~kept).sum()), block)


def _errors(amounts: np.ndarray, constants: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    parts = amounts * constants
    share = parts / np.maximum(parts.sum(axis=1, keepdims=True), 1e-300)
    off = np.abs(parts.sum(axis=1) / seconds - 1.0)
    found: np.ndarray = (share * off[:, None]).sum(axis=0) / np.maximum(share.sum(axis=0), 1e-12)
    return found


def forward_share(seen: Observations) -> tuple[float, Interval] | None:
    """The share that the encoder's first phase has of both; None where that was not measured."""
    shares = np.array(seen.forward_share)
    return (float(np.median(shares)), interval(resampled_median(shares))) if len(shares) else None


def fixed_of_step(seen: Observations) -> tuple[float, Interval]:
    """Seconds once a step (`sync=step`): before its first pack and behind its last."""
    rest = np.array(seen.rest_s)
    return float(np.median(rest)), interval(resampled_median(rest))


def fixed_of_micro_batch(seen: Observations, compute: Fit) -> tuple[float, Interval]:
    """Seconds once a micro-batch, which gathering and reducing add to what its packs compute: those by which the
    relative errors are least. With images, where any were measured: the encoder is gathered where any rank has one.
    """
    alone = [pack for pack in seen.packs if pack.degree == 1]
    of_images = [pack for pack in alone if pack.has_images] or alone
    whole = np.array([pack.whole_s for pack in of_images])
    above = np.maximum(0.0, whole - np.array([compute.seconds(pack) for pack in of_images]))
    resampled = resample(len(above), lambda rows: np.array(weighted_median(above[rows], 1.0 / whole[rows])))
    return weighted_median(above, 1.0 / whole), interval(resampled)


def resample(num: int, fit: Callable[[np.ndarray], np.ndarray], times: int = RESAMPLED) -> np.ndarray:
    """What `fit` makes of rows drawn anew, (times, ...)."""
    drawn = np.random.default_rng(0)
    return np.array([fit(drawn.integers(0, num, num)) for _ in range(times)])


def resampled_median(values: np.ndarray) -> np.ndarray:
    return resample(len(values), lambda rows: np.median(values[rows]))


def interval(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, CONFIDENCE)
    return float(low), float(high)
