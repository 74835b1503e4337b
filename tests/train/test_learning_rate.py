import math
from itertools import pairwise

import pytest

from dhp_ray.train.state.optimizer import learning_rate_factor


def test_warm_up_then_half_a_cosine():
    factors = [learning_rate_factor(step, 9, warmup_steps=3, minimum=0.2) for step in range(1, 10)]
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * place / 5)) / 2 for place in range(6)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, *cosine])
    assert factors[3] == 1.0
    assert factors[-1] == pytest.approx(0.2)


def test_constant_stays_at_the_peak():
    assert [learning_rate_factor(step, 6, 2, minimum=1.0) for step in range(1, 7)] == [1 / 3, 2 / 3, 1, 1, 1, 1]


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate_factor(1, 100, 0) == 1.0


def test_runs_shorter_than_the_warm_up_and_steps_past_the_end():
    assert learning_rate_factor(2, 2, warmup_steps=10) == pytest.approx(2 / 11)
    assert learning_rate_factor(1, 1, warmup_steps=0) == 1.0
    assert learning_rate_factor(50, 10, warmup_steps=0, minimum=0.3) == pytest.approx(0.3)


@pytest.mark.parametrize("total_steps", [8, 20])
def test_between_two_steps_the_factor_lies_between_theirs(total_steps):
    """The schedule may be there if some rows cannot be used."""
    for begin, end in pairwise(range(1, total_steps + 1)):
        factors = [learning_rate_factor(step, total_steps, 6, minimum=0.1) for step in (begin, begin + 0.1, end)]
        assert factors in (sorted(factors), sorted(factors, reverse=True))


def test_the_cosine_never_rises_nor_leaves_its_bounds():
    factors = [learning_rate_factor(step, 200, 20, minimum=0.05) for step in range(21, 260)]
    assert all(earlier >= later for earlier, later in pairwise(factors))
    assert min(factors) == pytest.approx(0.05)
