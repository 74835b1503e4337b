"""Least squares within bounds, for few unknowns; and a weighted median.

Minimise |A x - b|^2 for low <= x <= high. Each unknown is free or at a bound. A free unknown outside of its bounds goes
to the nearer bound. An unknown at a bound is freed if the sum decreases inside. If several are wrong, the last one
changes (Murty's rule, which ends if A's columns are independent). Two unknowns, bounds 0 and 1:

    free: (1.4, -0.2), the last wrong one, x2, to 0 | x1 alone: 1.3, to 1 | x2 would not grow: done
"""

from __future__ import annotations

import numpy as np

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
    found: np.ndarray = np.clip(x, low, high) / scale
    return found
