"""Who sends a plan, and how long one is waited for."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest

from dhp_ray.planner.cost.model import CostModel
from dhp_ray.runtime.driver.dispatch import Planning
from dhp_ray.runtime.driver.feedback import LATE_S, patience_s

COST = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1.0})


def test_of_two_that_claim_a_step_one_sends() -> None:
    for _ in range(50):
        planning, barrier, claims = Planning(1, (1.0,), [], COST), Barrier(2), []

        def claim(planning: Planning = planning, barrier: Barrier = barrier, claims: list[bool] = claims) -> None:
            barrier.wait()
            claims.append(planning.claim())

        threads = [Thread(target=claim) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(claims) == [False, True]
        assert planning.claimed


@pytest.mark.parametrize(
    ("last_resort_s", "expected_s", "scale", "seconds"),
    [
        (4.0, 3.0, 1.0, 1.0),  # what the last resort loses
        (4.0, 3.0, 2.5, 2.5),  # in measured seconds
        (3.0, 3.0, 1.0, LATE_S),  # nothing to lose
        (2.9, 3.0, 1.0, LATE_S),
        (4.0, 3.0, None, float("inf")),  # nobody knows what a predicted second is yet
    ],
)
def test_a_plan_is_waited_for_as_long_as_that_costs_less_than_the_last_resort(
    last_resort_s: float, expected_s: float, scale: float | None, seconds: float
) -> None:
    assert patience_s(last_resort_s, expected_s, scale) == pytest.approx(seconds)
