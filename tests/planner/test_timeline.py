"""Fixed seconds in a plan's timeline: every rank is busy with them, once a step or once a micro-batch."""

from dataclasses import replace

import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Sample, idle_fraction, plan_batch
from dhp_ray.planner.plan import VisionPlan
from dhp_ray.planner.timeline import apart_timeline, fixed_starts, plan_starts, starts_of

COST = CostModel(0.0, 1e-2, 1.0, 3.0, {2: 1e9})


def test_a_rank_that_always_works_is_never_idle():
    plan = plan_batch([Sample("a", 100), Sample("b", 40)], ClusterSpec(1, 1, 100), COST)
    assert (plan.fixed_s, fixed_starts(plan)) == (3.0, [0.0])
    assert plan.predicted_time_s == pytest.approx(3.0 + 1.4)
    assert idle_fraction(plan) == pytest.approx(0.0)


def test_idle_is_what_is_left_beside_packs_and_fixed_seconds():
    plan = plan_batch([Sample("a", 100), Sample("b", 50)], ClusterSpec(2, 2, 100), COST, planner="static")
    assert idle_fraction(plan) == pytest.approx(0.5 / (2 * 4.0))


def test_every_micro_batch_pays_its_own():
    plan = plan_batch([Sample(str(row), 100) for row in range(3)], ClusterSpec(1, 1, 100), COST, sync="micro_batch")
    assert fixed_starts(plan) == pytest.approx([0.0, 4.0, 8.0])
    assert sorted(starts_of(plan.groups, 1, plan.sync, plan.fixed_s)[0]) == pytest.approx([3.0, 7.0, 11.0])
    assert idle_fraction(plan) == pytest.approx(0.0)


@pytest.mark.parametrize("keeps", [True, False])
def test_images_encoded_apart_come_before_and_after_the_packs(keeps):
    cost = CostModel(0.0, 1.0, 0.0, 3.0, {2: 1e9}, vision_linear_s=1.0, latency_s=3.0)
    samples = [Sample("a", 1, 1, ((1, 1, 1),) * 4), Sample("b", 2)]
    plan = plan_batch(samples, ClusterSpec(2, 2, 4), cost, encoder="world")
    plan = replace(plan, vision=VisionPlan("world", keeps))
    apart = apart_timeline(plan)
    assert apart.encoded_s == pytest.approx([2 / 3, 2 / 3])
    assert apart.starts_s == pytest.approx([2 / 3, 2 / 3])
    assert apart.backward_s == pytest.approx([8 / 3, 8 / 3])
    assert apart.makespan_s == pytest.approx(4.0 if keeps else 4.0 + 2 / 3)
    starts, makespan = plan_starts(plan)
    assert (starts, makespan) == (pytest.approx([3 + 2 / 3] * 2), pytest.approx(3 + apart.makespan_s))
    if keeps:
        assert plan.predicted_time_s == pytest.approx(makespan)
        assert idle_fraction(plan) == pytest.approx(0.0)
    assert apart_timeline(plan_batch(samples, ClusterSpec(2, 2, 4), cost)) is None
