"""plan_batch: what holds for every planner, and what it refuses."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner import (
    PLANNERS,
    ClusterSpec,
    CostModel,
    PlanError,
    Sample,
    SequenceTooLongError,
    plan_batch,
    replay,
    starts_of,
)

COST = CostModel(quadratic_s=5e-9, linear_s=2e-4, comm_bytes_per_token=2e6, fixed_s=0.5,
                 bandwidth_bytes_per_s={2: 1.2e11, 8: 1e11, 16: 1e10},
                 vision_quadratic_s=1e-9, vision_linear_s=1e-5)
RING = CostModel(quadratic_s=5e-9, linear_s=2e-4, comm_bytes_per_token=2e5, fixed_s=0.1,
                 bandwidth_bytes_per_s={"intra": 1e10, "inter": 1e9},
                 communication="ring", latency_s=1e-3, pack_s=0.01, overlap=0.8)
MEASURED = CostModel(quadratic_s=5e-6, linear_s=2e-4, comm_bytes_per_token=2e5, fixed_s=0.1,
                     bandwidth_bytes_per_s={"intra": 1e10, "inter": 1e9}, vision_linear_s=1e-4, encoder_pass_s=5e-3,
                     attention_block=64, communication="ring", latency_s=1e-3, pack_s=0.01)


def samples_of(lengths):
    return [Sample(f"s{row}", int(length)) for row, length in enumerate(lengths)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 8),
       st.sampled_from(sorted(PLANNERS)),
       st.sampled_from(["step", "micro_batch"]), st.sampled_from([COST, RING, MEASURED]), st.booleans(),
       st.randoms(use_true_random=False))
def test_a_plan_is_sound(lengths, num_ranks, ranks_per_node, planner, sync, cost, uneven, random):
    speeds = tuple(random.uniform(0.3, 1.5) for _ in range(num_ranks)) if uneven else ()
    cluster = ClusterSpec(num_ranks, ranks_per_node, 100, speeds)
    samples = [Sample(f"s{row}", length, 0, ((1, 4, random.randint(1, 8)),) * random.randint(0, 3))
               for row, length in enumerate(lengths)
               if length <= cluster.max_tokens]
    if not samples:
        return
    plan = plan_batch(samples, cluster, cost, planner=planner, sync=sync)
    plan.validate()
    assert all(group.ranks == tuple(sorted(group.ranks)) for group in plan.groups)
    assert plan.lower_bound_s <= plan.predicted_time_s * (1 + 1e-9)
    again = plan_batch(samples, cluster, cost, planner=planner, sync=sync)
    assert again.groups == plan.groups
    assert replay(json.loads(json.dumps(plan.to_json()))).groups == plan.groups
    assert starts_of(plan.groups, num_ranks, sync, cost.fixed_s)[1] == pytest.approx(plan.predicted_time_s)
    for group in plan.groups:
        tokens = [samples[row].num_tokens for row in group.sequences]
        images = [seconds for row in group.sequences for seconds in cost.image_s(samples[row])]
        members = [sum(seconds for seconds, encoder in zip(images, group.encoders) if encoder == rank)
                   / cluster.speeds[rank] for rank in group.ranks]
        once_s = cost.encoder_pass_s / min(cluster.speeds[rank] for rank in group.ranks) if any(members) else 0.0
        assert group.predicted_time_s == pytest.approx(
            cost.pack_time_s(tokens, group.ranks, cluster, max(members) + once_s))


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_bad_batches_are_named(planner):
    cluster = ClusterSpec(4, 2, 100)
    with pytest.raises(PlanError, match="no sequences"):
        plan_batch([], cluster, COST, planner=planner)
    with pytest.raises(PlanError, match="sample s1: 0 tokens"):
        plan_batch(samples_of([5, 0]), cluster, COST, planner=planner)
    with pytest.raises(PlanError, match="sample s0: -3 tokens"):
        plan_batch(samples_of([-3]), cluster, COST, planner=planner)
    with pytest.raises(SequenceTooLongError, match="sample s1: 401 tokens; the cluster holds at most 400"):
        plan_batch(samples_of([5, 401]), cluster, COST, planner=planner)


def test_bad_names_and_clusters_are_refused():
    with pytest.raises(PlanError, match=r"planner: got 'best'; allowed: dhp"):
        plan_batch(samples_of([5]), ClusterSpec(1, 1, 10), COST, planner="best")
    with pytest.raises(PlanError, match="sync: got 'never'; allowed: step, micro_batch"):
        plan_batch(samples_of([5]), ClusterSpec(1, 1, 10), COST, sync="never")
    with pytest.raises(PlanError, match="rank 1 has speed 0"):
        ClusterSpec(2, 2, 10, (1.0, 0.0))
    with pytest.raises(PlanError, match="rank 0 has speed 1e-320"):
        ClusterSpec(2, 2, 10, (1e-320, 1.0))


@pytest.mark.parametrize("planner", sorted(PLANNERS))
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_one_rank_and_more_ranks_than_sequences(planner, sync):
    plan = plan_batch(samples_of([60, 60, 30]), ClusterSpec(1, 8, 100), COST, planner=planner, sync=sync)
    assert {group.ranks for group in plan.groups} == {(0,)}
    plan = plan_batch(samples_of([250, 20]), ClusterSpec(16, 8, 100), COST, planner=planner, sync=sync)
    assert all(group.degree >= 3 for group in plan.groups if 0 in group.sequences)


def test_more_minimum_degrees_than_ranks_are_split_in_time():
    plan = plan_batch(samples_of([400] * 5), ClusterSpec(4, 4, 100), COST, sync="micro_batch")
    assert [group.micro_batch for group in plan.groups] == [0, 1, 2, 3, 4]


def test_the_same_lengths_in_numpy_types_plan_alike():
    lengths = np.array([300, 20, 20], dtype=np.int32)
    assert plan_batch(samples_of(lengths), ClusterSpec(4, 4, 100), COST).groups
