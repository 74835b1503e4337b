"""Against the exact optimum of small cases (benchmarks/planner_exact.py)."""

import numpy as np
import pytest

pytest.importorskip("ortools", reason="OR-tools is in the dev extra")

from benchmarks.planner_exact import compare


@pytest.mark.slow
def test_near_the_optimum_and_the_bound_below_it():
    results = [compare(seed) for seed in range(200)]
    proven = [(gap, slack) for gap, slack, is_proven in results if is_proven]
    gaps, slack = np.array(proven).T
    assert len(proven) >= 190
    assert gaps.mean() <= 0.01
    assert gaps.max() <= 0.05
    assert slack.min() >= -2e-3  # the exact model's ticks are rounded down
