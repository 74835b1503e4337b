"""Fixed seconds in a plan's timeline: every rank is busy with them, once a step or once a micro-batch; and images that
are encoded apart from the packs."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Sample, idle_fraction, plan_batch
from dhp_ray.planner.plan.types import Plan, VisionPlan
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


def test_a_micro_batch_lasts_as_long_as_the_longest_encoding_and_the_longest_rest():
    """Ranks meet at every layer: one encodes for 3 s and takes 2 s more, the other has 4 s of text. The plan file says
    so too; in `sync=step` nobody waits. Encoded apart, the images are dealt to both ranks."""
    cost = CostModel(0.0, 1.0, 0.0, 0.5, {2: 1e9}, vision_linear_s=1.0, latency_s=9.0)
    samples = [Sample("images", 0, 2, ((1, 1, 2), (1, 1, 1))), Sample("text", 4)]
    plan = plan_batch(samples, ClusterSpec(2, 2, 4), cost, sync="micro_batch")
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert sorted((group.predicted_time_s, group.encode_s, group.rest_s) for group in read.groups) == [
        (4.0, 0.0, 4.0), (5.0, 3.0, 2.0)]
    assert plan.predicted_time_s == plan_starts(read)[1] == pytest.approx(0.5 + 3.0 + 4.0)
    assert plan_batch(samples, ClusterSpec(2, 2, 4), cost).predicted_time_s == pytest.approx(0.5 + 5.0)
    apart = plan_batch(samples, ClusterSpec(2, 2, 4), cost, sync="micro_batch", encoder="auto")
    assert apart.vision.apart
    assert [group.encode_s for group in apart.groups] == [0.0, 0.0]
    assert apart.predicted_time_s == pytest.approx(0.5 + 2.0 + 4.0)
    older = plan.to_json()
    older["groups"] = [{name: value for name, value in group.items() if name not in ("encode_s", "rest_s")}
                       for group in older["groups"]]
    assert plan_starts(Plan.from_json(older))[1] == pytest.approx(0.5 + 5.0), "as it was priced when it was made"


@pytest.mark.parametrize(("gather_s", "seconds"), [(6.0, 7.0), (8.0, 8.0)])
def test_a_micro_batch_takes_at_least_as_long_as_its_parameters_travel(gather_s, seconds):
    """3 + 4 s, of packs that take 5 and 4 s alone."""
    cost = CostModel(0.0, 1.0, 0.0, 0.5, {2: 1e9}, vision_linear_s=1.0, latency_s=9.0, gather_s=gather_s)
    samples = [Sample("images", 0, 2, ((1, 1, 2), (1, 1, 1))), Sample("text", 4)]
    plan = plan_batch(samples, ClusterSpec(2, 2, 4), cost, sync="micro_batch")
    assert plan.predicted_time_s == plan_starts(plan)[1] == pytest.approx(0.5 + seconds)
    assert [group.predicted_time_s for group in plan.groups] == [gather_s] * 2
    assert plan.lower_bound_s <= plan.predicted_time_s


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


def test_a_frozen_encoder_has_one_phase():
    cost = CostModel(0.0, 1.0, 0.0, 3.0, {2: 1e9}, vision_linear_s=1.0, vision_forward=1.0)
    plan = plan_batch([Sample("a", 4, 0, ((1, 1, 1),) * 4)], ClusterSpec(2, 2, 4), cost, encoder="world")
    apart = apart_timeline(plan)
    assert apart.encoded_s.tolist() == [2.0, 2.0]
    assert apart.backward_s.tolist() == apart.end_s.tolist() == apart.ended_s.tolist()
    assert plan.predicted_time_s == pytest.approx(3.0 + apart.makespan_s)


@pytest.mark.parametrize("speeds", [(), (1.0, 0.5, 1.0, 0.75)])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_is_read_takes_the_seconds_that_were_predicted(seed, speeds):
    """Rows travel at a price, images have costs of their own; every rank's phases and packs follow each other."""
    random = np.random.default_rng(seed)
    cost = CostModel(1e-3, 1e-2, 1e3, 3.0, {2: 1e6, 4: 5e5}, vision_linear_s=1e-2, vision_quadratic_s=1e-4,
                     feature_bytes=1e4, latency_s=1e-3)
    samples = [Sample(str(row), int(random.integers(1, 90)), 0, tuple(
        (1, 2, int(random.integers(1, 20))) for _ in range(random.integers(0, 4)))) for row in range(12)]
    samples = [replace(sample, vision_tokens=sum(2 * grid[2] for grid in sample.vision_grids) // 4)
               for sample in samples]
    plan = plan_batch(samples, ClusterSpec(4, 2, 100, speeds), cost, encoder="world")
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    apart = apart_timeline(read)
    starts, makespan = plan_starts(read)
    assert makespan == pytest.approx(plan.predicted_time_s)
    assert 0.0 <= idle_fraction(read) < 1.0
    for rank in range(4):
        times = [(start - 3.0, start - 3.0 + group.predicted_time_s) for start, group in zip(starts, read.groups)
                 if rank in group.ranks]
        edges = [0.0, apart.encoded_s[rank], apart.ready_s[rank], *(edge for pair in sorted(times) for edge in pair),
                 apart.ended_s[rank], apart.backward_s[rank], apart.end_s[rank]]
        assert all(first <= second + 1e-9 for first, second in pairwise(edges))
    if not speeds:
        images_s = cost.images_s(np.array([grid for sample in samples for grid in sample.vision_grids], float))
        busy_s = 4 * 3.0 + images_s.sum() + sum(group.predicted_time_s * group.degree for group in read.groups)
        assert idle_fraction(read) == pytest.approx(1.0 - busy_s / (4 * makespan))
