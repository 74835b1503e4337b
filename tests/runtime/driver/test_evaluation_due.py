"""After which steps a run is evaluated."""

from __future__ import annotations

from dhp_ray.runtime.driver.evaluation import is_due


def test_it_is_evaluated_every_so_many_steps_and_after_the_last_one() -> None:
    assert [step for step in range(1, 121) if is_due(step, 50, last=step == 120)] == [50, 100, 120]
    assert [step for step in range(1, 21) if is_due(step, 50, last=step == 20)] == [20]
