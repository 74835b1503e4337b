"""Speeds from what packs should have cost and what they did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dhp_ray.runtime.driver.feedback import FORGET_AFTER, SpeedMeter, busy_s
from dhp_ray.train.results import PackTime, StepResult


def metered(num_ranks: int, steps: Sequence[tuple[Sequence[float], Sequence[float]]], **limits: float) -> SpeedMeter:
    """A meter that has seen (nominal, busy) seconds of each step."""
    meter = SpeedMeter(num_ranks, **limits)  # type: ignore[arg-type]
    for nominal, busy in steps:
        meter.observe(nominal, busy)
    return meter


def test_nothing_seen_is_nominal_speed() -> None:
    assert SpeedMeter(3).measured == SpeedMeter(3).planned() == (1.0, 1.0, 1.0)


def test_long_packs_make_nobody_slow() -> None:
    """Rank 0 had five times the work and took five times as long; what the others waited for is not in their busy
    seconds.
    """
    assert metered(3, [((5.0, 1.0, 1.0), (5.0, 1.0, 1.0))] * 30, evict_below=0.5).planned() == (1.0, 1.0, 1.0)


def test_a_machine_slow_as_a_whole_makes_nobody_slow() -> None:
    meter = metered(4, [((1.0, 2.0, 1.0, 0.5), (7.0, 14.0, 7.0, 3.5))] * 30, evict_below=0.5, patience=3)
    assert meter.measured == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert not meter.slow()
    assert not meter.no_good()


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_rank_at_a_third_is_seen_within_three_steps_and_so_is_its_recovery(num_ranks: int) -> None:
    nominal = (1.0,) * num_ranks
    good, bad = (1.0,) * num_ranks, (3.0,) + (1.0,) * (num_ranks - 1)
    meter = metered(num_ranks, [(nominal, good)] * 20)
    for _ in range(3):
        meter.observe(nominal, bad)
    assert meter.planned()[0] == pytest.approx(1 / 3, abs=0.06)
    assert meter.planned()[1:] == (1.0,) * (num_ranks - 1)
    for _ in range(20):
        meter.observe(nominal, bad)
    assert meter.measured[0] == pytest.approx(1 / 3, abs=1e-3)
    for _ in range(5):
        meter.observe(nominal, good)
    assert meter.planned() == (1.0,) * num_ranks


@pytest.mark.parametrize(("speed", "told"), [(0.84, 0.85), (0.51, 0.5), (0.4, 0.4), (1 / 3, 0.325), (0.21, 0.2125),
                                             (1 / 12.53, 0.08125), (0.01, 0.01015625)])
def test_speeds_are_told_in_steps_of_a_tenth_of_them_at_most(speed: float, told: float) -> None:
    meter = metered(3, [((1.0,) * 3, (1 / speed, 1.0, 1.0))] * 10)
    assert meter.planned() == (pytest.approx(told), 1.0, 1.0)
    assert abs(told / speed - 1) <= 0.05


def test_plans_are_told_the_speed_of_the_work_without_what_packs_pay_once() -> None:
    """5 s of work and 1 s paid once: at half the speed 11 s; a machine twice as slow as a whole changes nothing."""
    for scale in (1.0, 2.0):
        meter = SpeedMeter(3, evict_below=0.2, patience=3)
        for _ in range(10):
            meter.observe((6.0,) * 3, (11.0 * scale, 6.0 * scale, 6.0 * scale), (1.0,) * 3)
        assert meter.measured == pytest.approx((6 / 11, 1.0, 1.0))
        assert meter.planned() == (0.5, 1.0, 1.0)


def test_a_rank_that_mostly_pays_once_is_still_told_a_speed() -> None:
    meter = SpeedMeter(3)
    for _ in range(10):
        meter.observe((6.0,) * 3, (7.5, 6.0, 6.0), (5.9,) * 3)
    assert 0 < meter.planned()[0] < 0.1  # 0.1 s of work took 1.6 s


def test_of_two_the_faster_one_is_nominal() -> None:
    assert metered(2, [((1.0, 1.0), (1.0, 4.0))] * 10).planned() == pytest.approx((1.0, 0.25))


def test_a_speed_above_the_others_is_told_as_nominal() -> None:
    assert metered(3, [((1.0, 1.0, 1.0), (0.5, 1.0, 1.0))] * 10).planned() == (1.0, 1.0, 1.0)


def test_noise_below_an_eighth_changes_no_plan_and_slows_nobody() -> None:
    random = np.random.default_rng(0)
    meter = SpeedMeter(4, evict_below=0.2, patience=20)
    for _ in range(500):
        nominal = random.uniform(0.5, 2.0, 4)
        meter.observe(nominal, nominal * random.uniform(0.9, 1.1, 4))
        assert meter.planned() == (1.0,) * 4
        assert not meter.slow()


def test_one_outlier_evicts_nobody() -> None:
    meter = SpeedMeter(3, evict_below=0.2, patience=3)
    for step in range(60):
        meter.observe((1.0, 1.0, 1.0), (30.0 if step % 10 == 5 else 1.0, 1.0, 1.0))
        assert step % 10 in (5, 6, 7, 8) or not meter.no_good()


def test_a_rank_without_packs_keeps_its_speed_for_a_while_and_is_then_tried_again() -> None:
    meter = metered(3, [((1.0, 1.0, 1.0), (4.0, 1.0, 1.0))] * 10)
    for _ in range(FORGET_AFTER - 1):
        meter.observe((0.0, 1.0, 1.0), (0.0, 1.0, 1.0))
        assert meter.planned()[0] == pytest.approx(0.25)
    meter.observe((0.0, 1.0, 1.0), (0.0, 1.0, 1.0))
    assert meter.planned() == (1.0, 1.0, 1.0)


def test_slow_and_no_good_are_said_after_their_steps() -> None:
    meter = SpeedMeter(5, evict_below=0.2, patience=7)
    said = []
    for _ in range(10):
        meter.observe((1.0,) * 5, (1.0, 10.0, 1.6, 1.3, 1.0))
        said.append((sorted(meter.slow()), meter.no_good()))
    assert said[:4] == [([], ())] * 4
    assert said[4:6] == [([1], ())] * 2  # 0.13 of the typical speed, which is rank 3's
    assert said[6:] == [([1], (1,))] * 4
    for _ in range(6):
        meter.observe((1.0,) * 5, (1.0, 1.0, 1.6, 1.3, 1.0))
    assert not meter.slow()
    assert not meter.no_good()


def test_news_are_told_once() -> None:
    meter = SpeedMeter(4)
    told = []
    for busy in [10.0] * 8 + [1.0] * 8:
        meter.observe((1.0,) * 4, (1.0, 1.0, 1.0, busy))
        told.append(meter.news())
    assert [news for news in told if news] == [{3: True}, {3: False}]
    assert told[4] == {3: True}


def test_nobody_is_evicted_where_that_is_off() -> None:
    assert not metered(2, [((1.0, 1.0), (1.0, 1000.0))] * 50, evict_below=0.0, patience=1).no_good()


def test_busy_seconds_leave_out_what_a_rank_was_blocked_for() -> None:
    def result(rank: int, *times: PackTime) -> StepResult:
        return StepResult(step=1, rank=rank, loss_sum=1.0, num_valid_tokens=1, gradient_norm=1.0, learning_rate=1.0,
                          applied=True, state_version=1,
                          step_time_s=9.0, data_wait_s=0.0, pack_times=times, pool={})

    results = [result(2, PackTime(0, 0.0, 2.0, 0.5), PackTime(1, 2.0, 3.0, 0.25)), result(0)]
    assert busy_s(results, 4) == [0.0, 0.0, 2.25, 0.0]  # ranks 1 and 3 have not reported
