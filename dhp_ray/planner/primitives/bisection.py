"""Bisection: the least feasible makespan between an infeasible and a feasible one."""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.primitives.compiled import inner


@inner
def halve(span: np.ndarray, tolerance: float) -> bool:
    """`span` (3,): an infeasible makespan, a feasible one, and the one to try, which this sets halfway between them.
    Returns False once the two differ by at most `tolerance`, a share of the second. The caller tries the third makespan
    and puts it in place of one of the two:

        while halve(span, 1e-3):
            span[int(fits(span[2]))] = span[2]
    """
    span[2] = (span[0] + span[1]) / 2
    return bool(span[1] - span[0] > tolerance * span[1])
