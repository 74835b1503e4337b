"""Images encoded apart from the packs with sync=micro_batch: which pass each is in, how long it all takes, and what a
plan file says of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner import ClusterSpec, CostModel, Plan, PlanError, Sample, idle_fraction, plan_batch, replay
from dhp_ray.planner.encoder.world import lockstep_passes
from dhp_ray.planner.plan.types import VisionPlan
from dhp_ray.planner.timeline import apart_timeline, fixed_starts, plan_starts
from tests.planner.reference_encoder import timeline
from tests.planner.test_images_apart import ALONE, MIXED, example


def passes_of(images, most):
    """`images`: patches of each, by rank; a second for ten."""
    encoder = [rank for rank, patches in enumerate(images) for _ in patches]
    patches = np.array([count for of_rank in images for count in of_rank], dtype=np.float64)
    found = lockstep_passes(patches / 10, patches, np.array(encoder, dtype=np.int64), len(images), most)
    return [[sorted((int(patches[image]) for image in range(len(patches))
                     if (encoder[image], found[image]) == (rank, number)), reverse=True)
             for number in range(int(found.max()) + 1)] for rank in range(len(images))]


def test_the_module_s_example():
    images = [[30, 40, 20, 60, 70], [60, 60, 60]]
    assert passes_of(images, 100) == [[[70], [60, 20], [40, 30]], [[60], [60], [60]]]
    assert passes_of(images, 0) == [[[70, 60, 40, 30, 20]], [[60, 60, 60]]]
    assert passes_of([[30, 40], [120, 10]], 100) == [[[40], [30]], [[120], [10]]], "a larger image is a pass by itself"


def plainly(seconds, patches, encoder, num_ranks, most, count):
    """The same in plain Python; None where `count` passes are too few."""
    spent, filled, passes = {}, {}, {}
    for image in sorted(range(len(seconds)), key=lambda image: -seconds[image]):
        rank = encoder[image]
        room = [number for number in range(count) if filled.get((rank, number), 0) + patches[image] <= most
                or not filled.get((rank, number))]
        if not room:
            return None
        best = min(room, key=lambda number: (spent.get((rank, number), 0.0), number))
        passes[image] = best
        spent[rank, best] = spent.get((rank, best), 0.0) + seconds[image]
        filled[rank, best] = filled.get((rank, best), 0) + patches[image]
    return [passes[image] for image in range(len(seconds))]


@settings(max_examples=75, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3), st.sampled_from([0.5, 1.0, 2.0])), min_size=1,
                max_size=30), st.integers(5, 60))
def test_passes_are_the_fewest_that_hold_all_images_and_alike_long(images, most):
    patches, encoder, weights = (list(column) for column in zip(*images))
    seconds = [count * weight for count, weight in zip(patches, weights)]
    found = lockstep_passes(np.array(seconds), np.array(patches, dtype=np.float64), np.array(encoder), 4, most).tolist()
    fewest = next(count for count in range(1, 100) if plainly(seconds, patches, encoder, 4, most, count))
    assert max(found) + 1 == fewest
    assert found == plainly(seconds, patches, encoder, 4, most, fewest)
    for rank in range(4):
        for number in range(fewest):
            inside = [patches[image] for image in range(len(found))
                      if (encoder[image], found[image]) == (rank, number)]
            assert sum(inside) <= most or len(inside) == 1


@pytest.mark.parametrize(("tokens_of_b", "group_s", "world_s"), [(2, 5.0, 4.0), (4, 7.0, 6.0)])
def test_the_page_s_example_in_one_micro_batch(tokens_of_b, group_s, world_s):
    """With images in the packs it takes the longest encoding (3 s) plus the longest rest, of whichever pack."""
    plans = {encoder: plan_batch(example(tokens_of_b), ClusterSpec(2, 2, 4), ALONE, sync="micro_batch", encoder=encoder)
             for encoder in ("group", "world", "auto")}
    assert plans["group"].predicted_time_s == pytest.approx(group_s)
    assert plans["world"].predicted_time_s == pytest.approx(world_s)
    assert plans["auto"].vision == plans["world"].vision
    costly = plan_batch(example(tokens_of_b), ClusterSpec(2, 2, 4), replace(ALONE, feature_bytes=1e12),
                        sync="micro_batch", encoder="auto")
    assert costly.vision == plans["group"].vision, "apart is no shorter if images stay on the ranks of their packs"
    assert plans["world"].vision == VisionPlan("world", num_passes=1)
    assert all(plan.lower_bound_s <= plan.predicted_time_s for plan in plans.values())


def test_a_pass_takes_as_long_as_parameters_take_to_come():
    """Images take a second at most, and two passes hold them; of three seconds for each pass a third is forward."""
    cost = replace(ALONE, encoder_gather_s=3.0, memory_bytes_per_token=10.0, language_bytes_per_token=5.0,
                   encoder_bytes_per_patch=20.0)
    plan = plan_batch(example(2), ClusterSpec(2, 2, 4), cost, sync="micro_batch", encoder="world")
    assert plan.vision == VisionPlan("world", False, 2, 1)
    assert plan.predicted_time_s == pytest.approx(1.0 + 2.0 + 3.0)
    narrow = plan_batch(example(2), ClusterSpec(2, 2, 4), replace(cost, encoder_bytes=10.0), sync="micro_batch",
                        encoder="world")
    assert narrow.vision == VisionPlan("world", False, 1, 2)
    assert narrow.predicted_time_s == pytest.approx(2.0 + 2.0 + 6.0)


COSTS = {"kept": {}, "in passes": {"encoder_bytes_per_patch": 60.0}, "gathered": {"encoder_gather_s": 0.3},
         "frozen": {"vision_forward": 1.0, "encoder_bytes_per_patch": 60.0}}


@pytest.mark.parametrize("speeds", [(), (1.0, 0.5, 1.0, 0.75)])
@pytest.mark.parametrize("kind", COSTS)
def test_plans_take_the_seconds_that_were_predicted(kind, speeds):
    random = np.random.default_rng(3)
    cost = CostModel(1e-3, 1e-2, 1e3, 3.0, {2: 1e6, 4: 5e5}, vision_linear_s=1e-2, vision_quadratic_s=1e-4,
                     feature_bytes=10.0, latency_s=1e-3, memory_bytes_per_token=100.0, language_bytes_per_token=5.0)
    cost = replace(cost, **COSTS[kind])
    samples = [Sample(str(row), int(random.integers(1, 90)), 0, tuple(
        (1, 2, int(random.integers(1, 20))) for _ in range(random.integers(0, 8)))) for row in range(20)]
    samples = [replace(sample, vision_tokens=sum(2 * grid[2] for grid in sample.vision_grids) // 4)
               for sample in samples]
    plan = plan_batch(samples, ClusterSpec(4, 2, 100, speeds), cost, sync="micro_batch", encoder="world")
    assert (plan.vision.num_passes > 1) == ("encoder_bytes_per_patch" in COSTS[kind])
    assert timeline(plan, cost) == pytest.approx(plan.predicted_time_s)
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert [(group.encoders, group.passes) for group in read.groups] == [
        (group.encoders, group.passes) for group in plan.groups]
    again = replay(json.loads(json.dumps(plan.to_json())))
    assert (again.groups, again.vision) == (plan.groups, plan.vision)
    starts, end = plan_starts(read)
    assert end == pytest.approx(plan.predicted_time_s)
    apart = apart_timeline(read)
    assert min(starts) == pytest.approx(3.0 + apart.ready_s[0])
    fixed = fixed_starts(read)
    assert len(fixed) == len({group.micro_batch for group in read.groups}) > 1
    begins = sorted({start for start in starts})
    assert fixed == pytest.approx([0.0, *(begin - 3.0 for begin in begins[1:])])
    assert apart.forward_busy_s.max() <= apart.encoded_s.max() + 1e-9
    assert 0.0 < idle_fraction(read) < 1.0


def test_packs_that_encode_their_own_images_have_no_passes():
    plan = plan_batch(MIXED, ClusterSpec(4, 2, 200), ALONE, sync="micro_batch")
    assert plan.vision == VisionPlan()
    assert not any(group.passes for group in plan.groups)
    for sync in ("step", "micro_batch"):
        text = [Sample(str(index), 50) for index in range(6)]
        assert plan_batch(text, ClusterSpec(4, 2, 200), ALONE, sync=sync, encoder="world").vision == VisionPlan()


def test_a_plan_whose_ranks_would_not_meet_in_every_pass_is_refused():
    plan = plan_batch(MIXED, ClusterSpec(4, 2, 200), ALONE, sync="micro_batch", encoder="world")
    index = next(index for index, group in enumerate(plan.groups) if group.encoders)
    for passes in ((), (1,) * 10, (-1,) * 10):
        groups = list(plan.groups)
        groups[index] = replace(groups[index], passes=passes)
        with pytest.raises(PlanError, match=rf"group {index} has 10 images to encode in 1 passes, and passes"):
            replace(plan, groups=tuple(groups)).validate()
    with pytest.raises(PlanError, match="0 encoder passes on every rank with sync=micro_batch and images encoded by "
                                        "world; allowed: at least 1 with sync=micro_batch and world, else 0"):
        replace(plan, vision=VisionPlan("world")).validate()
    in_packs = plan_batch(MIXED, ClusterSpec(4, 2, 200), ALONE, sync="micro_batch")
    with pytest.raises(PlanError, match="3 encoder passes on every rank with sync=micro_batch and images encoded by g"):
        replace(in_packs, vision=VisionPlan(num_passes=3)).validate()
