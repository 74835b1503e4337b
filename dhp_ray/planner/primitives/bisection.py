"""Bisection: the least makespan that can be had, between one that cannot and one that can."""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import inner


def halve(span: np.ndarray, tolerance: float) -> bool:
    """`span` (3,): a makespan that cannot be had, one that can, and the one to try, which this sets halfway between
    them. False once the two differ by at most `tolerance`, a share of the second. Whoever tries the third puts it in
    place of one of the two:

        while halve(span, 1e-3):
            span[int(fits(span[2]))] = span[2]
    """
    span[2] = (span[0] + span[1]) / 2
    return bool(span[1] - span[0] > tolerance * span[1])


compiled_halve = inner(halve)
"""The same for compiled loops."""
