"""benchmarks/scale.py: its cases, the plans that no planner makes, and what a row says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale import BASELINES, Row, fair_gain, geometric_mean, main, spread_of
from benchmarks.scale_cases import Case, Opened, opened, plan_of
from dhp_ray.planner.baselines.static import Layout, uniform
from dhp_ray.simulate.step import simulate_step

CASE = Case("qwen3_vl_2b", "H100", "caption_heavy", "micro_batch", 8, (0, 1))


def test_a_case_that_does_not_fit_is_none() -> None:
    assert opened(Case("qwen2_5_vl_32b", "H100", "caption_heavy", "step", 8, (0,))) is None


def test_all_planners_have_the_same_batches_memory_and_costs() -> None:
    found = Opened(CASE)
    assert [len(batch) for batch in found.batches] == [64, 64]
    assert found.cost.gather_s > 0
    for name in (*BASELINES, "dhp"):
        planned = found.planned(name)
        assert [plan.samples for plan in planned.plans] == [tuple(batch) for batch in found.batches]
        assert all(plan.cluster == found.cluster and plan.sync == "micro_batch" for plan in planned.plans)
        assert planned.time_s >= sum(plan.lower_bound_s for plan in planned.plans)


def test_a_simulated_step_takes_what_was_planned() -> None:
    found = Opened(replace(CASE, seeds=(0,)))
    problem = found.problems()[0]
    plan = plan_of(problem, uniform(problem, Layout(1, found.cluster.tokens_per_rank)))
    assert simulate_step(plan, problem).time_s == pytest.approx(plan.predicted_time_s)


def test_a_row_says_what_it_means() -> None:
    times_s = {"static": 4.0, "static_best": 4.0, "pow2": 3.0, "dhp_paper": 3.3, "megatron": 5.0, "dhp": 2.0}
    row = Row(CASE, "micro_batch", 100, times_s, 1.6, 2.5, 1.5)
    assert (row.best, row.gain, row.gain_auto, row.most, row.over("static")) == ("pow2", 1.5, 1.875, 2.0, 2.0)
    assert row.gain_plain == 1.2
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_a_fair_gain_gives_every_planner_the_same_choices() -> None:
    """At 8 ranks the best baseline is a little behind; with images in its packs alone it would be further behind."""
    case = replace(CASE, workload="document_heavy", seeds=(0,))
    gain, baseline = fair_gain(case)
    found = [opened(replace(case, recomputes=again)) for again in ("false", "true", "packs")]
    times_s = {name: min(one.planned(name, encoder="auto").time_s for one in found if one)
               for name in (baseline, "dhp")}
    assert gain == pytest.approx(times_s[baseline] / times_s["dhp"])
    assert baseline in BASELINES
    assert 0.99 < gain < 1.5
    assert spread_of([2.0, 8.0]) == "4.000 (2.000 to 8.000), 2 cases"


def test_unknown_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert capsys.readouterr().err == ("scale.py: nonsense: no such table; allowed: fair, headline, peers, study, "
                                       "sizes, --quick\n")
