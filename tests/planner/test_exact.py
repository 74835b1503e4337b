"""Against the exact optimum of small cases (benchmarks/planner_exact.py)."""

import numpy as np
import pytest

pytest.importorskip("ortools", reason="OR-tools is in the dev extra")

from benchmarks.planner_exact import QUICK, compare


def check(seeds):
    """Of cases whose optimum the solver proves in its time: all but 2 %, though on cores that others use."""
    results = [compare(seed) for seed in seeds]
    unproven = [seed for seed, result in zip(seeds, results) if not result.proven]
    assert len(unproven) <= 0.02 * len(results), unproven
    results = [result for result in results if result.proven]
    gaps = np.array([result.gap for result in results])
    assert gaps.mean() <= 0.01
    assert gaps.max() <= 0.05
    assert gaps.min() >= -1e-9
    assert all(result.bound_s <= result.most_s for result in results)


@pytest.mark.seconds
def test_near_the_optimum_and_the_bound_below_it():
    check(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_near_the_optimum_and_the_bound_below_it_in_200_cases():
    check(range(200))
