"""In how many ways a batch is planned whose packs may recompute layers, and that none of them is forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dhp_ray.planner import ClusterSpec, CostModel, Plan, Sample, checked_problem, plan_batch
from dhp_ray.planner.bound import bounded
from dhp_ray.planner.plan.cluster import NO_RECOMPUTATION, Recomputation
from dhp_ray.planner.search.ways import ways_of

COST = CostModel(0.0, 1e-3, 2e5, 0.5, {2: 1e9}, communication="ring", latency_s=1e-3, pack_s=0.2)
EIGHT = Recomputation(1.0, 1000, 8000, 1000)
"""1,000 tokens fit on a rank with all activations, 8,000 with none."""


def batch(count: int, median: float, most: int, seed: int = 0) -> list[Sample]:
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(median), 1.0, count))
    return [Sample(str(row), int(length)) for row, length in enumerate(np.clip(lengths, 20, most))]


def cluster_of(num_ranks: int) -> ClusterSpec:
    return ClusterSpec(num_ranks, 8, 1000, recomputation=EIGHT)


def test_the_module_s_example() -> None:
    samples = [Sample("long", 3500), Sample("short", 10)]
    problem = bounded(checked_problem(samples, cluster_of(4), COST, sync="micro_batch"))
    ways = list(ways_of(problem))
    assert [way.cluster.tokens_per_rank for way in ways] == [1000, 1000, 8000, 4000, 2000, 1000]
    assert [way.cluster.recomputation.share for way in ways] == pytest.approx([0, 1, 1, 0.8571, 0.5714, 1], abs=1e-4)
    assert [way.items.minimum_degree[0] for way in ways] == [4, 1, 1, 1, 2, 1]
    assert [way.machine.tokens_per_rank for way in ways] == [1000, 1000, 8000, 4000, 2000, 8000], "of several sequences"
    assert [way.cluster.recomputation.share_of(1.0) for way in ways[2:5]] == [
        way.cluster.recomputation.share for way in ways[2:5]], "of every pack"


def test_ways_that_do_not_hold_the_longest_sequence_are_left_out() -> None:
    """5,000 tokens on each of two ranks: with 4,000 they do not fit, nor without recomputation."""
    problem = bounded(checked_problem([Sample("long", 10_000), Sample("short", 10)], cluster_of(2), COST))
    assert [way.cluster.tokens_per_rank for way in ways_of(problem)] == [1000, 1000, 8000, 1000]
    [long] = [group for group in plan_batch(problem.samples, cluster_of(2), COST).groups if 0 in group.sequences]
    assert long.degree == 2
    assert long.recomputed >= float(EIGHT.share_of(5000)) - 1e-9


def test_a_pack_that_recomputes_a_little_saves_a_micro_batch() -> None:
    """The module's example. Two micro-batches pay `fixed_s` twice; as full packs of 2,000 they would recompute 0.57."""
    samples = [Sample("long", 1010), Sample("short", 100)]
    plan = plan_batch(samples, cluster_of(1), replace(COST, fixed_s=0.15, pack_s=0.0), sync="micro_batch")
    [group] = plan.groups
    assert group.recomputed == pytest.approx(0.113, abs=1e-3)


def test_without_any_there_is_one_way() -> None:
    problem = checked_problem([Sample("a", 300)], ClusterSpec(2, 2, 1000), COST)
    assert list(ways_of(problem)) == [problem]


def plans(planner: str, sync: str, samples: list[Sample], num_ranks: int) -> tuple[Plan, Plan]:
    """With recomputation, and without."""
    cluster = cluster_of(num_ranks)
    with_, without = (plan_batch(samples, each, COST, planner=planner, sync=sync)
                      for each in (cluster, replace(cluster, recomputation=NO_RECOMPUTATION)))
    return with_, without


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_plans_are_not_longer_than_without(sync: str) -> None:
    gains = []
    for seed in range(4):
        found, plain = plans("dhp", sync, batch(60, 600, 7000, seed), 8)
        found.validate()
        assert found.predicted_time_s <= plain.predicted_time_s * (1 + 1e-9)
        gains.append(plain.predicted_time_s / found.predicted_time_s)
    assert np.mean(gains) > 1.02
    plan_batch([Sample("long", 60_000), *batch(20, 600, 7000)], cluster_of(8), COST, sync=sync).validate()


@pytest.mark.parametrize("median", [150, 600, 2500])
def test_the_last_resort_is_not_longer_than_without(median: float) -> None:
    samples = batch(300, median, 7000)
    found, plain = plans("dhp_quick", "step", samples, 16)
    assert found.predicted_time_s <= plain.predicted_time_s * (1 + 1e-9)
