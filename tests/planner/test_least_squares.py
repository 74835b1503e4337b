"""Bounded least squares beside coordinate descent, which is slow and obvious."""

import numpy as np
import pytest

from dhp_ray.planner.cost.refit import bounded_least_squares


def by_descent(matrix, target, low, high):
    """One unknown at a time to its best value within the bounds, until nothing moves."""
    x = np.clip(np.zeros(matrix.shape[1]), low, high)
    for _ in range(20000):
        before = x.copy()
        for place, column in enumerate(matrix.T):
            x[place] = np.clip(x[place] + column @ (target - matrix @ x) / (column @ column), low[place], high[place])
        if np.abs(x - before).max() < 1e-13:
            return x
    return x


@pytest.mark.parametrize("seed", range(150))
def test_as_near_as_descent_comes(seed):
    draw = np.random.default_rng(seed)
    num = int(draw.integers(1, 8))
    matrix, target = draw.normal(size=(14, num)), draw.normal(size=14)
    low = draw.normal(size=num) - 0.5
    high = low + np.abs(draw.normal(size=num)) if seed % 2 else np.full(num, np.inf)
    found = bounded_least_squares(matrix, target, low, high)
    assert (found >= low - 1e-12).all()
    assert (found <= high + 1e-12).all()
    best = np.linalg.norm(matrix @ by_descent(matrix, target, low, high) - target)
    assert np.linalg.norm(matrix @ found - target) <= best * (1 + 1e-9)


def test_columns_of_any_size():
    matrix = np.array([[1e9, 1.0], [1e9, 3.0], [3e9, 1.0]])
    assert bounded_least_squares(matrix, matrix @ [2e-9, 0.5]) == pytest.approx([2e-9, 0.5])


def test_the_example_of_the_page():
    matrix = np.array([[1.0, 0.5], [0.0, 1.0]])
    assert bounded_least_squares(matrix, matrix @ [1.4, -0.2], 0.0, 1.0) == pytest.approx([1.0, 0.0])


def test_what_the_data_cannot_tell():
    """Nothing of a column of zeros, and of two alike only their sum: the ridge that splits them evenly costs twelve
    digits, and rounding differs between processors."""
    assert bounded_least_squares(np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([1.0, 2.0])) == pytest.approx([1.0, 0.0])
    halves = bounded_least_squares(np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([1.0, 2.0]))
    assert halves == pytest.approx([0.5, 0.5], abs=1e-3)
    assert halves.sum() == pytest.approx(1.0)
