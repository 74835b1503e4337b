"""How often the state is mirrored: copies take at most 2 % of the time, and a fault then costs 50 copies at most."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhp_ray.runtime.driver.feedback import COPY_SHARE, RECENT_COPIES, Mirroring, steps_between
from dhp_ray.schema import MAX_MIRROR_STEPS

SECONDS = st.floats(1e-6, 1e4)


@pytest.mark.parametrize(("copy_s", "step_s", "current", "every"), [
    (0.004, 0.3, 1, 1),  # a small model: every step
    (7.0, 10.0, 1, 35),  # a 3B on two nodes
    (1.8, 10.0, 1, 9),
    (1.8, 10.0, 20, 20),  # as often as 20 steps is fewer than allowed, and two thirds of that could be too often
    (1.8, 10.0, 21, 14),
    (0.0055, 0.3, 2, 2),  # nine tenths of what each step may take: a little more, and it would be too much
    (0.002, 0.3, 2, 1),
    (500.0, 1.0, 1, MAX_MIRROR_STEPS),
])
def test_the_share_of_a_step(copy_s: float, step_s: float, current: int, every: int) -> None:
    assert steps_between(copy_s, step_s, current) == every


@given(SECONDS, SECONDS, st.integers(1, MAX_MIRROR_STEPS))
def test_no_more_than_the_share_and_no_less_than_a_third_of_it(copy_s: float, step_s: float, current: int) -> None:
    every = steps_between(copy_s, step_s, current)
    needed = math.ceil(copy_s / (COPY_SHARE * step_s))
    assert 1 <= every <= MAX_MIRROR_STEPS
    assert every >= min(needed, MAX_MIRROR_STEPS)
    assert every == 1 or every < 3 * needed
    assert steps_between(copy_s, step_s, every) == every, "the same measurements change nothing"


@given(st.lists(st.floats(0.85, 1.2), min_size=2), SECONDS)
def test_times_that_vary_a_little_never_change_it_to_and_fro(factors: list[float], copies: float) -> None:
    every, seen = 1, [1]
    for factor in factors:
        every = steps_between(copies * factor, 10.0, every)
        seen.append(every)
    assert seen == sorted(seen)


def test_a_number_is_taken_as_it_is() -> None:
    every_third, never = Mirroring("3"), Mirroring("0")
    assert [step for step in range(1, 10) if every_third.due(step)] == [3, 6, 9]
    assert not any(never.due(step) for step in range(1, 10))
    assert not every_third.observe([[5.0], [5.0]], step_s=0.1)
    assert every_third.every == 3


def run(mirroring: Mirroring, steps: range, copy_s: float, step_s: float) -> list[int]:
    """The steps that are mirrored, where a copy takes so long on both ranks."""
    mirrored = []
    for step in steps:
        if mirroring.due(step):
            mirroring.last = step
            mirroring.observe([[copy_s], [copy_s / 2]], step_s)
            mirrored.append(step)
    return mirrored


def test_auto_begins_with_the_first_step_and_follows_what_copies_take() -> None:
    mirroring = Mirroring("auto")
    assert run(mirroring, range(1, 31), copy_s=1.0, step_s=5.0) == [1, 11, 21]
    mirroring.enter()  # other ranks; what the old ones took says nothing
    assert run(mirroring, range(25, 61), copy_s=0.39, step_s=5.0) == [25, 31, 37, 43, 49, 55]
    mirroring.enter()
    assert run(mirroring, range(61, 65), copy_s=0.01, step_s=5.0) == [61, 62, 63, 64]


def test_the_slowest_rank_counts_by_the_fastest_of_its_last_copies() -> None:
    mirroring = Mirroring("auto")
    assert mirroring.observe([[0.4, 0.1], [0.3, 0.9]], step_s=1.0)
    assert mirroring.copy_s == 0.3
    assert mirroring.every == 15
    mirroring.observe([[0.5], []], step_s=1.0)  # a rank that has none since
    assert mirroring.copy_s == 0.3
    mirroring.observe([[0.2] * RECENT_COPIES, [0.2] * RECENT_COPIES], step_s=1.0)
    assert mirroring.copy_s == 0.2


def test_nothing_changes_before_both_times_are_known() -> None:
    mirroring = Mirroring("auto")
    assert not mirroring.observe([[], []], step_s=1.0)  # one rank has no replica
    assert not mirroring.observe([[0.3], [0.3]], step_s=0.0)
    assert mirroring.every == 1
    assert mirroring.observe([[], []], step_s=1.0)
    assert mirroring.every == 15
