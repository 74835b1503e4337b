from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dhp_ray.planner import PlanError, plan_batch, replay
from dhp_ray.report.gains import BASELINES, compare, compared, plan_from_json, spread
from tests.report.runs import COST, plan_of


def read_plan(step: int, **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps(plan_of(step, **more).to_json()))


def test_a_plan_file_gives_its_plan_back() -> None:
    plan = plan_of(4)
    again = plan_from_json(json.loads(json.dumps(plan.to_json())))
    assert (again.samples, again.cluster) == (plan.samples, plan.cluster)
    assert [(group.ranks, group.pack, group.encoders) for group in again.groups] == [(group.ranks, group.pack, group.encoders) for group in plan.groups]
    assert replay(again.to_json()).predicted_time_s == plan.predicted_time_s


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_baselines_plan_the_same_batch_under_the_same_cost(sync: str) -> None:
    plan = plan_from_json(read_plan(2, sync=sync))
    found = compared(2, plan)
    assert found.times_s["dhp"] == plan.predicted_time_s
    for name in BASELINES:
        other = plan_batch(plan.samples, plan.cluster, COST, planner=name, sync=sync)
        assert found.times_s[name] == pytest.approx(other.predicted_time_s)
        assert found.times_s[name] >= found.lower_bound_s * (1 - 1e-9)


def test_steps_are_added_up() -> None:
    gains = compare([3, 1, 2], read_plan)
    assert [step.step for step in gains.steps] == [1, 2, 3]
    assert gains.planners()[0] == "dhp"
    assert set(gains.planners()) == {"dhp", *BASELINES}
    for name in gains.planners():
        assert gains.total_s(name) == pytest.approx(sum(step.times_s[name] for step in gains.steps))
        assert 0 <= gains.idle(name) < 1
    assert gains.lower_bound_s() <= gains.total_s("dhp") * (1 + 1e-9)
    assert gains.total_s("dhp") < gains.total_s("static")


def test_a_run_of_a_baseline_is_compared_with_the_others() -> None:
    plan = plan_of(1)
    tree = plan_batch(plan.samples, plan.cluster, COST, planner="static").to_json()
    assert compare([1], lambda step: tree).planners()[0] == "static"


def test_the_budget_ends_it_after_one() -> None:
    assert len(compare([1, 2, 3], read_plan, budget_s=0.0).steps) == 1


def test_a_plan_without_inputs_is_one_line() -> None:
    tree = read_plan(1)
    del tree["inputs"]
    with pytest.raises(PlanError, match="plan file: damaged"):
        plan_from_json(tree)


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
