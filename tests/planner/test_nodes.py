"""Nodes of any size and in any order: what crosses them is costed as crossing, and groups stay inside them where they
fit.
"""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import RING, bimodal

from dhp_ray.planner import PLANNERS, ClusterSpec, CostModel, PlanError, Sample, plan_batch, replay, starts_of

SLOW_LINKS = CostModel(**RING.to_json() | {"bandwidth_bytes_per_s": {"intra": 1e11, "inter": 1e8}})
TWO_AND_THREE = ClusterSpec.of_nodes((0, 0, 1, 1, 1), 8192)


def seconds_by_hand(tokens, degree, slowest, crosses, cost):
    """A pack of sequences without images by the formulas of `cost`, in plain Python."""
    attention = cost.quadratic_s * sum(length**2 for length in tokens)
    compute = (attention + cost.linear_s * sum(tokens)) / degree / slowest
    bandwidth = cost.bandwidth_bytes_per_s["inter" if crosses else "intra"]
    transfer = (degree - 1) * cost.comm_bytes_per_token * sum(tokens) / degree / bandwidth
    hidden = cost.overlap * (degree - 1) / degree * attention / (degree * slowest)
    return compute + max(0.0, transfer - hidden) + (degree - 1) * cost.latency_s + cost.pack_s


def test_a_group_of_two_nodes_crosses_and_one_inside_the_larger_does_not():
    assert TWO_AND_THREE.ranks_per_node == 3
    for ranks, crosses in (((0, 1), False), ((2, 3, 4), False), ((1, 2), True), ((0, 1, 2), True)):
        assert TWO_AND_THREE.crosses(ranks) is crosses
        assert RING.pack_time_s([9000], ranks,
                                TWO_AND_THREE) == pytest.approx(seconds_by_hand([9000], len(ranks), 1.0, crosses, RING))


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize(("nodes", "expected"), [((0, 0, 1, 1, 1), {(0, 1), (2, 3, 4)}),
                                                 ((0, 1, 0, 1, 1), {(0, 2), (1, 3, 4)})])
def test_groups_are_as_large_as_the_nodes(nodes, expected, sync):
    samples = [Sample("three", 24_000), Sample("two", 16_000)]
    plan = plan_batch(samples, ClusterSpec.of_nodes(nodes, 8192), SLOW_LINKS, sync=sync)
    assert {group.ranks for group in plan.groups} == expected


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_groups_stay_inside_nodes_of_any_order(sync):
    nodes = [0] * 8 + [1] * 8 + [2] * 4
    random.Random(0).shuffle(nodes)
    cluster = ClusterSpec.of_nodes(nodes, 8192)
    for seed in range(3):
        plan = plan_batch(bimodal(80, 8, seed), cluster, SLOW_LINKS, sync=sync)
        assert any(group.degree > 2 for group in plan.groups)
        assert not any(cluster.crosses(group.ranks) for group in plan.groups if group.degree <= 8)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.lists(st.integers(1, 60_000), min_size=1, max_size=30),
       st.sampled_from(sorted(PLANNERS)),
       st.sampled_from(["step", "micro_batch"]), st.booleans(), st.randoms(use_true_random=False))
def test_any_nodes_plan_and_cost_as_reckoned_by_hand(nodes, lengths, planner, sync, uneven, random):
    speeds = tuple(random.uniform(0.4, 1.2) for _ in nodes) if uneven else ()
    cluster = ClusterSpec.of_nodes(nodes, 8192, speeds)
    samples = [Sample(str(row), length) for row, length in enumerate(lengths)
               if length <= cluster.max_tokens] or [Sample("0", 5)]
    pool = [tuple(sorted(random.sample(range(len(nodes)), 2))) for _ in range(3)] if len(nodes) > 2 else []
    plan = plan_batch(samples, cluster, RING, planner=planner, sync=sync, pool=pool)  # validates itself
    assert plan.lower_bound_s <= plan.predicted_time_s * (1 + 1e-9)
    assert starts_of(plan.groups, len(nodes), sync, RING.fixed_s)[1] == pytest.approx(plan.predicted_time_s)
    for group in plan.groups:
        assert group.ranks == tuple(sorted(group.ranks))
        tokens = [samples[row].num_tokens for row in group.sequences]
        crosses = len({nodes[rank] for rank in group.ranks}) > 1
        slowest = min(cluster.speeds[rank] for rank in group.ranks)
        assert group.predicted_time_s == pytest.approx(seconds_by_hand(tokens, group.degree, slowest, crosses, RING))
    assert replay(json.loads(json.dumps(plan.to_json()))).groups == plan.groups


def test_equal_nodes_plan_alike_in_any_order_of_their_ranks():
    samples = bimodal(40, 8)
    for sync in ("step", "micro_batch"):
        plan = plan_batch(samples, ClusterSpec(8, 4, 8192), RING, sync=sync)
        other = plan_batch(samples, ClusterSpec.of_nodes("abbabaab", 8192), RING, sync=sync)
        assert other.predicted_time_s == plan.predicted_time_s
        stands_for = (0, 3, 5, 6, 1, 2, 4, 7)
        assert [group.ranks for group in other.groups] == [tuple(sorted(stands_for[rank] for rank in group.ranks))
                                                           for group in plan.groups]


def test_the_nodes_of_a_plan_file_count_and_files_without_them_replay():
    tree = plan_batch([Sample("three", 24_000), Sample("two", 16_000)], TWO_AND_THREE, SLOW_LINKS).to_json()
    assert (tree["ranks_per_node"], tree["inputs"]["nodes"]) == (3, [0, 0, 1, 1, 1])
    assert replay(tree | {"ranks_per_node": 1}).to_json()["groups"] == tree["groups"]
    regular = plan_batch(bimodal(20, 6), ClusterSpec(6, 4, 8192), RING).to_json()
    assert (regular["ranks_per_node"], regular["inputs"].pop("nodes")) == (4, [0, 0, 0, 0, 1, 1])
    assert replay(regular).to_json()["groups"] == regular["groups"]
    with pytest.raises(PlanError, match="cluster: nodes of 5 ranks for 6 ranks"):
        replay(tree | {"num_ranks": 6, "inputs": tree["inputs"] | {"speeds": [1.0] * 6}})
