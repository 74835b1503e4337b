"""What a run plans with: from where it began to what packs have shown, over generations, resumes and lost drivers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.cost.refit import with_factors
from dhp_ray.planner.cost.work import TERMS, Work, constants_of, work_of
from dhp_ray.planner.plan.cluster import Offload
from dhp_ray.runtime.driver.feedback import HIGH, MOST_ROWS, STEPS_TO_STAY, CostRefits, least_error
from tests.runtime.driver.groups import config_of

PRIOR = CostModel(4e-8, 5e-5, 4608, 0.01, {2: 1e9}, communication="ring", latency_s=2e-3, pack_s=5e-3,
                  vision_linear_s=2e-5, memory_bytes_per_token=1000.0, estimated=True)
TRUE = with_factors(PRIOR, {"quadratic_s": 1.6, "linear_s": 1.8, "vision_linear_s": 1.5, "pack_s": 1.2})


def stepped(refits: CostRefits, steps: int, num_ranks: int = 2, seed: int = 0,
            true: CostModel = TRUE) -> list[CostModel]:
    """Steps whose packs take what `true` says; the cost in force after each."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(steps):
        samples = [Sample(str(row), int(draw.integers(20, 900)), 64, ((1, 16, 16),)) for row in range(8 * num_ranks)]
        work = work_of(plan_batch(samples, ClusterSpec(num_ranks, num_ranks, 2048), refits.cost))
        refits.observe(work, work.seconds(true))
        found.append(refits.cost)
    return found


def test_costs_become_what_packs_show_and_memory_stays() -> None:
    refits = CostRefits()
    assert refits.enter(PRIOR) == PRIOR
    last = stepped(refits, 6)[-1]
    assert [getattr(last, name) for name in ("quadratic_s", "linear_s")] == pytest.approx(
        [TRUE.quadratic_s, TRUE.linear_s], rel=0.15)
    untouched = {name: value for name, value in last.to_json().items() if name not in TERMS}
    assert untouched == {name: value for name, value in PRIOR.to_json().items() if name not in TERMS}


def test_packs_that_wait_for_host_memory_say_nothing_of_compute() -> None:
    """A link that is half as fast as its description is no slower compute."""
    cost = replace(PRIOR, offload_bytes_per_token=1e6, host_bytes_per_s=1e9)
    samples = [Sample(str(row), 900 + row) for row in range(24)]
    work = work_of(plan_batch(samples, ClusterSpec(2, 2, 512, offload=Offload(1.0, 0, 1024)), cost))
    assert work.waits_s.min() > 0
    refits = CostRefits()
    refits.enter(cost)
    for _ in range(4):
        assert refits.observe(work, work.seconds(cost) + work.waits_s) is None
    plain = work._replace(waits_s=0.0 * work.waits_s)
    assert refits.observe(plain, 1.5 * plain.seconds(cost)) is not None


def test_rows_of_a_large_step_are_kept_in_turns() -> None:
    """Phases of the encoder alternate, so that every second row would be of the same one."""
    refits = CostRefits()
    refits.enter(PRIOR)
    amounts = np.ones((2 * MOST_ROWS, len(TERMS)))
    work = Work(np.arange(2 * MOST_ROWS) // 2, np.zeros(2 * MOST_ROWS), amounts, np.zeros(2 * MOST_ROWS))
    seconds = np.tile([1.0, 2.0], MOST_ROWS)
    for _ in range(2):
        refits.observe(work, seconds)
    assert [set(seen.seconds.tolist()) for seen in refits._window] == [{1.0}, {2.0}]
    assert {len(seen.seconds) for seen in refits._window} == {MOST_ROWS}


def test_where_it_is_off_nothing_changes() -> None:
    refits = CostRefits()
    refits.enter(PRIOR, math.inf)
    assert stepped(refits, 3) == [PRIOR] * 3
    assert refits.to_json() == {}


def test_a_new_generation_goes_on_with_what_is_known_of_the_device() -> None:
    """Of other constants, as with recomputation, what was seen says nothing; by how much the first ones were off does.
    """
    refits = CostRefits()
    refits.enter(PRIOR)
    stepped(refits, 4)
    factors = dict(refits.factors)
    again = replace(PRIOR, linear_s=1.3 * PRIOR.linear_s, group_s=0.5)
    now = refits.enter(again)
    assert now.linear_s == pytest.approx(1.3 * PRIOR.linear_s * factors["linear_s"])
    assert now.group_s == 0.5
    assert refits.enter(PRIOR, math.inf) == PRIOR


def test_a_resumed_run_goes_on_with_the_terms_of_its_checkpoint() -> None:
    first = CostRefits()
    first.enter(PRIOR)
    stepped(first, 4)
    kept = first.to_json()
    second = CostRefits()
    second.restore(kept["terms"], kept["prior"])
    assert constants_of(second.enter(PRIOR)) == pytest.approx(constants_of(first.cost))
    elsewhere = CostRefits()  # on another device
    elsewhere.restore(kept["terms"], kept["prior"])
    assert elsewhere.enter(TRUE) == TRUE
    off = CostRefits()
    off.restore(kept["terms"], kept["prior"])
    assert off.enter(PRIOR, math.inf) == PRIOR
    older = CostRefits()  # a checkpoint from before there were refits
    older.restore({}, None)
    assert older.enter(PRIOR) == PRIOR


def test_a_new_driver_goes_on_with_the_terms_of_the_newest_plan() -> None:
    first = CostRefits()
    first.enter(PRIOR)
    stepped(first, 4)
    second = CostRefits()
    second.restore(first.cost.to_json())
    assert constants_of(second.enter(PRIOR)) == pytest.approx(constants_of(first.cost))


def test_of_a_large_step_some_rows_are_looked_at() -> None:
    refits = CostRefits()
    refits.enter(PRIOR)
    stepped(refits, 2, num_ranks=400)
    assert all(len(seen.seconds) <= MOST_ROWS for seen in refits._window)
    assert refits.cost.linear_s > 1.3 * PRIOR.linear_s


NEVER = math.inf


@pytest.mark.parametrize(("overrides", "estimated", "expected"), [
    ([], True, 0.0), ([], False, HIGH), (["train.deterministic=true"], True, NEVER),
    (["train.deterministic=true"], False, NEVER)])
def test_from_which_error_costs_are_refitted(
    tmp_path: Path, overrides: list[str], estimated: bool, expected: float
) -> None:
    assert least_error(config_of(str(tmp_path), *overrides), replace(PRIOR, estimated=estimated)) == expected


def test_measured_costs_change_only_where_their_error_stays_high() -> None:
    """Four ranks on two cores: packs take three times what was measured on quiet ones."""
    refits = CostRefits()
    refits.enter(PRIOR, HIGH)
    found = stepped(refits, 8, true=with_factors(PRIOR, dict.fromkeys(TERMS, 3.0)))
    assert found[:STEPS_TO_STAY - 1] == [PRIOR] * (STEPS_TO_STAY - 1)
    assert found[-1].linear_s == pytest.approx(3 * PRIOR.linear_s, rel=0.1)
    refits = CostRefits()
    refits.enter(PRIOR, HIGH)
    assert stepped(refits, 8, true=with_factors(PRIOR, dict.fromkeys(TERMS, 1.08))) == [PRIOR] * 8
