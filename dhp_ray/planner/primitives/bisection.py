"""Bisection: the least makespan that can be had, between one that cannot and one that can."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numba import njit


def halved(span: np.ndarray, tolerance: float) -> Iterator[float]:
    """The makespans to try, until the two of `span` (cannot be had, can be had) differ by at most `tolerance`, a share
    of the second. Whoever tries one puts it in place of one of the two:

        for makespan in halved(span, 1e-3):
            span[int(fits(makespan))] = makespan
    """
    while span[1] - span[0] > tolerance * span[1]:
        yield (span[0] + span[1]) / 2


compiled_halved = njit(halved)
"""The same for compiled loops. Not kept on disk: numba does not find the parts of a generator that comes from there."""
