from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhp_ray.planner import PlanError, checked_problem, plan_batch, plan_data_set, recorded_inputs, replay
from dhp_ray.planner.baselines.static import Layout, uniform
from dhp_ray.planner.plan.types import Plan
from dhp_ray.planner.timeline import time_of
from dhp_ray.report.gains import OTHERS, RUN, compare, spread
from tests.report.runs import COST, plan_of

BASELINES = set(OTHERS) - {"dhp"}


def read_plan(step: int, **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps(plan_of(step, **more).to_json()))


def test_a_plan_file_gives_its_plan_back() -> None:
    plan = plan_of(4)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert (again.samples, again.cluster) == (plan.samples, plan.cluster)
    assert [(group.ranks, group.sequences, group.encoders)
            for group in again.groups] == [(group.ranks, group.sequences, group.encoders) for group in plan.groups]
    assert replay(again.to_json()).predicted_time_s == plan.predicted_time_s


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_baselines_plan_the_same_batch_in_the_same_mode_under_the_same_cost(sync: str) -> None:
    plan = Plan.from_json(read_plan(2, sync=sync))
    found = compare([2], lambda step: plan.to_json())
    assert found.total_s(RUN) == plan.predicted_time_s
    for name in set(OTHERS) - {"static"}:
        other = plan_batch(plan.samples, plan.cluster, COST, planner=name, sync=sync)
        assert found.total_s(name) == pytest.approx(other.predicted_time_s)
        assert found.total_s(name) >= plan.lower_bound_s * (1 - 1e-9)


def test_static_is_one_layout_for_all_batches_and_not_packed_to_memory() -> None:
    gains = compare([1, 2, 3], read_plan)
    problems = [checked_problem(**recorded_inputs(plan.to_json())) for plan in gains.ran]
    plans = plan_data_set(problems)
    assert len({group.degree for plan in plans for group in plan.groups}) == 1
    assert [plan and plan.predicted_time_s for plan in gains.plans["static"]] == pytest.approx(
        [plan.predicted_time_s for plan in plans])
    full = Layout(plans[0].groups[0].degree, 480)
    assert gains.total_s("static_best") <= gains.total_s("static")
    assert gains.total_s("static") < sum(time_of(problem, uniform(problem, full)) for problem in problems)


def test_steps_are_added_up() -> None:
    gains = compare([3, 1, 2], read_plan)
    assert gains.planners()[0] == RUN
    assert set(gains.planners()) == {RUN, *OTHERS}
    for name in gains.planners():
        assert gains.total_s(name) == pytest.approx(sum(plan.predicted_time_s for plan in gains.plans[name] if plan))
        assert 0 <= gains.idle(name) < 1
    assert gains.lower_bound_s() <= gains.total_s("dhp") * (1 + 1e-9)
    assert gains.total_s(RUN) == gains.total_s("dhp")
    best = gains.best_baseline()
    assert best in BASELINES
    assert gains.total_s(best) == min(gains.total_s(name) for name in BASELINES)


def test_late_steps_count_in_what_the_run_took() -> None:
    """Step 2 ran on another plan than `dhp`'s: its own seconds are the run's."""
    plans = {step: plan_of(step) for step in (1, 2)}
    late = plan_batch(plans[2].samples, plans[2].cluster, COST, planner="static")
    trees = {1: plans[1].to_json(), 2: late.to_json()}
    gains = compare([1, 2], lambda step: trees[step])
    assert [plan.planner for plan in gains.ran] == ["dhp", "static"]
    assert gains.total_s(RUN) == pytest.approx(plans[1].predicted_time_s + late.predicted_time_s)
    dhp_s = plans[1].predicted_time_s + plans[2].predicted_time_s
    assert gains.total_s(RUN) > gains.total_s("dhp") == pytest.approx(dhp_s)


def test_the_budget_ends_it_after_one() -> None:
    assert len(compare([1, 2, 3], read_plan, budget_s=0.0).ran) == 1


def test_a_plan_without_inputs_is_one_line() -> None:
    tree = read_plan(1)
    del tree["inputs"]
    with pytest.raises(PlanError, match="plan file: damaged"):
        Plan.from_json(tree)


@given(st.integers(0, 500), st.integers(1, 60), st.integers(1, 60))
def test_steps_are_spread(count: int, limit: int, cut: int) -> None:
    steps = list(range(1, count + 1))
    chosen = spread(steps, limit)
    assert len(chosen) == len(set(chosen)) == min(count, limit)
    assert set(chosen) <= set(steps)
    if steps:
        assert chosen[0] == steps[-1]
        if limit > 1 and count > 1:
            assert steps[0] in chosen
    first = sorted(chosen[:cut])
    if len(chosen) > 8 and cut >= 5:  # cut short, what is left reaches over the run
        assert first[0] <= count / 2


@pytest.mark.parametrize("encoder", ["group", "world", "auto"])
def test_a_plan_of_dhp_is_as_long_as_dhp_s_wherever_its_images_are_encoded(encoder: str) -> None:
    plan = plan_of(1, encoder=encoder)
    gains = compare([1], lambda step: plan.to_json())
    assert gains.total_s(RUN) == pytest.approx(gains.total_s("dhp"))
