"""Fits a cost's constants to the measured seconds of packs, with their errors.

Every constant is at least 0. Errors are relative to the measured time, so a short pack counts as much as a long one.
Packs whose error is above 10 % and above OUTLYING times the median error are left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dhp_ray.measure.observations import MeasureError, Observations, PackSeconds
from dhp_ray.planner.least_squares import bounded_least_squares, weighted_median
from dhp_ray.planner.work import TERMS

OUTLYING = 6.0
SPARE = 3
"""Different packs that must be measured in addition to one for each constant."""

BLOCKS = (0.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
"""Candidates for the number of keys that an attention kernel takes at a time; the one with the least error is used."""


class Fit(NamedTuple):
    """Constants, and the mean relative error of each: over all measurements, weighted by the share that the constant
    has in them. `block`: attention_block; `predicted` and `measured`: seconds of each measurement; `left_out`: number
    of measurements that were left out.
    """

    constants: dict[str, float]
    errors: dict[str, float]
    predicted: np.ndarray
    measured: np.ndarray
    left_out: int = 0
    block: float = 0.0

    def seconds(self, pack: PackSeconds) -> float:
        """The seconds of the busiest member's compute by this fit."""
        return float((pack.amounts_at(self.block) @ np.array(list(self.constants.values()))).max())

    @property
    def relative_errors(self) -> np.ndarray:
        found: np.ndarray = np.abs(self.predicted / self.measured - 1.0)
        return found


def fit_compute(packs: Sequence[PackSeconds]) -> Fit:
    """Fit the constants of compute (`planner/work.py`) to packs on single ranks.

    Raises:
        MeasureError: too few packs to separate the constants, or packs that take no longer for more tokens.
    """
    fits = [_fit_at(block, packs) for block in BLOCKS]
    best = min(fits, key=lambda fit: float(np.mean(fit.relative_errors)))
    if best.constants["quadratic_s"] + best.constants["linear_s"] == 0.0:
        raise MeasureError(f"{len(packs)} packs were measured, and those of more tokens took no longer; allowed: "
                           "packs that do, as on a machine that others use less")
    return best


def _fit_at(block: float, packs: Sequence[PackSeconds]) -> Fit:
    """Fit the constants for kernels that take `block` keys at a time."""
    amounts = np.array([pack.amounts_at(block)[0] for pack in packs]).reshape(-1, len(TERMS))
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
    errors = _errors(amounts, solved, seconds)[used]
    return Fit(dict(zip(TERMS, solved.tolist())),
               dict(zip(np.array(TERMS)[used].tolist(), errors.tolist())), amounts @ solved, seconds,
               int((~kept).sum()), block)


def _errors(amounts: np.ndarray, constants: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    parts = amounts * constants
    share = parts / np.maximum(parts.sum(axis=1, keepdims=True), 1e-300)
    off = np.abs(parts.sum(axis=1) / seconds - 1.0)
    found: np.ndarray = (share * off[:, None]).sum(axis=0) / np.maximum(share.sum(axis=0), 1e-12)
    return found


def forward_share(seen: Observations) -> float | None:
    """The share of the encoder's first phase in the time of both phases; None if it was not measured."""
    return float(np.median(seen.forward_share)) if seen.forward_share else None


def fixed_of_step(seen: Observations) -> float:
    """Seconds of a step before its first pack and after its last one: `fixed_s` of `sync=step`, `update_s` of
    `sync=micro_batch`.
    """
    return float(np.median(seen.rest_s))


def fixed_of_micro_batch(seen: Observations, compute: Fit) -> float:
    """Seconds that gathering and reducing add once per micro-batch to the compute of its packs: the value with the
    least relative errors. Only packs with images count if any were measured, because the encoder is gathered if any
    rank has an image.
    """
    alone = [pack for pack in seen.packs if pack.degree == 1]
    of_images = [pack for pack in alone if pack.has_images] or alone
    whole = np.array([pack.whole_s for pack in of_images])
    above = np.maximum(0.0, whole - np.array([compute.seconds(pack) for pack in of_images]))
    return weighted_median(above, 1.0 / whole)
