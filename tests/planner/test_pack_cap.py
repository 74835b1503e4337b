"""The baselines at their best pack cap: never worse than packed to memory, and one static layout for a whole data set.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL, RING, bimodal

from dhp_ray.planner import PLANNERS, ClusterSpec, CostModel, Sample, checked_problem, plan_batch, plan_data_set
from dhp_ray.planner.baselines.megatron import KINDS
from dhp_ray.planner.baselines.pack_cap import best_cap, capacities, degrees_at
from dhp_ray.planner.baselines.paper import paper_at
from dhp_ray.planner.baselines.pow2 import pow2_at
from dhp_ray.planner.baselines.static import Layout, degrees_for, least_degree_of, uniform
from dhp_ray.planner.timeline import time_of

ROOT = Path(__file__).parents[2]
PACKED_TO_MEMORY = {
    "static": lambda problem, memory: [uniform(problem, Layout(least_degree_of([problem]), memory))],
    "static_best": lambda problem, memory: [uniform(problem, Layout(degree, memory))
                                            for degree in degrees_for([problem])],
    "pow2": lambda problem, memory: [pow2_at(problem, memory, memory)],
    "dhp_paper": lambda problem, memory: [paper_at(problem, memory, memory)],
    "megatron": lambda problem, memory: [kind(problem, memory) for kind in KINDS]}
"""The baselines as nobody runs them: packs as full as memory allows."""


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_many_packs_a_rank(planner, sync):
    """More than fifty: two per cent above a round's share of the tokens is then above memory."""
    cost = CostModel.load(ROOT / "conf" / "cost" / "cuda.yaml")
    lengths = np.minimum(np.random.default_rng(5).lognormal(6, 1, 330).astype(int) + 1, 1500)
    samples = [Sample(str(row), int(length)) for row, length in enumerate(lengths)]
    plan_batch(samples, ClusterSpec(1, 8, 1500), cost, planner=planner, sync=sync)  # is validated


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=40), st.integers(1, 12),
       st.sampled_from(sorted(PACKED_TO_MEMORY)),
       st.sampled_from(["step", "micro_batch"]), st.sampled_from([ALL_TO_ALL, RING]), st.booleans(),
       st.randoms(use_true_random=False))
def test_never_worse_than_packed_to_memory(lengths, num_ranks, planner, sync, cost, uneven, random):
    """And deterministic; `validate` checks that no pack is above memory."""
    speeds = tuple(random.uniform(0.4, 1.2) for _ in range(num_ranks)) if uneven else ()
    cluster = ClusterSpec(num_ranks, 4, 8192, speeds)
    samples = [Sample(str(row), length) for row, length in enumerate(lengths) if length <= cluster.max_tokens]
    if not samples:
        return
    plan, problem = plan_batch(samples, cluster, cost, planner=planner,
                               sync=sync), checked_problem(samples, cluster, cost, sync=sync)
    assert plan.predicted_time_s <= min(time_of(problem, schedule)
                                        for schedule in PACKED_TO_MEMORY[planner](problem, 8192)) * (1 + 1e-12)
    assert plan_batch(samples, cluster, cost, planner=planner, sync=sync).groups == plan.groups
    plan.validate()


def test_every_baseline_is_among_them():
    assert set(PACKED_TO_MEMORY) == set(PLANNERS) - {"dhp", "dhp_quick"}


@pytest.mark.parametrize("planner", sorted(PACKED_TO_MEMORY))
def test_what_fits_one_rank_is_dealt_to_all_where_that_is_shorter(planner):
    """Packed to memory, rank 0 alone would run all of it: 0.09 s."""
    cost = CostModel(0.0, 1e-3, 1e9, 0.0, {2: 1e9})
    plan = plan_batch([Sample(str(row), 30) for row in range(3)], ClusterSpec(3, 3, 100), cost, planner=planner)
    assert sorted(group.ranks for group in plan.groups) == [(0,), (1,), (2,)]
    assert plan.predicted_time_s == pytest.approx(0.03)


def test_packs_stay_whole_where_every_pack_costs():
    """Ten short sequences on one rank: a pack of its own for each would cost ten times pack_s."""
    cost = CostModel(0.0, 1e-6, 1.0, 0.0, {2: 1e9}, pack_s=1.0)
    for planner in PACKED_TO_MEMORY:
        assert len(plan_batch([Sample(str(row), 10) for row in range(10)], ClusterSpec(1, 1, 100), cost,
                              planner=planner).groups) == 1


def test_a_sequence_beyond_the_cap_runs_alone_and_keeps_its_ranks():
    tokens = np.array([900, 80, 40])
    assert capacities(tokens, 2, 60).tolist() == [900, 120, 120]
    assert degrees_at(tokens, 60, 4).tolist() == [4, 2, 1]


def test_memory_is_the_cap_where_none_is_shorter():
    problem = checked_problem([Sample("a", 70), Sample("b", 70)], ClusterSpec(2, 2, 100), ALL_TO_ALL)
    seen = []
    assert best_cap([problem], lambda problem, cap: seen.append(cap) or uniform(problem, Layout(1, cap)))[1] == 100
    assert max(seen) == 100
    assert len(set(seen)) == len(seen) > 5


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_one_layout_for_a_data_set(sync):
    cluster = ClusterSpec(16, 8, 8192)
    problems = [checked_problem(bimodal(48, 16, seed), cluster, ALL_TO_ALL, sync=sync) for seed in range(3)]
    plans = plan_data_set(problems)
    degrees = {group.degree for plan in plans for group in plan.groups}
    assert len(degrees) == 1
    assert degrees.pop() >= least_degree_of(problems)
    total_s = sum(plan.predicted_time_s for plan in plans)
    layouts = [Layout(degree, 8192) for degree in degrees_for(problems)]
    times = [sum(time_of(problem, uniform(problem, layout)) for problem in problems) for layout in layouts]
    assert total_s <= min(times) * (1 + 1e-12)
    best_of_each = [plan_batch(problem.samples, cluster, ALL_TO_ALL, planner="static_best", sync=sync)
                    for problem in problems]
    assert total_s >= 0.999 * sum(plan.predicted_time_s for plan in best_of_each)
    for plan in plans:
        plan.validate()
        assert plan.lower_bound_s <= plan.predicted_time_s


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_one_layout_for_a_data_set_with_images_apart(sync):
    """`world` encodes all images apart, `auto` where that is shorter: it is never longer than either, here."""
    cluster, cost = ClusterSpec(8, 8, 4096), replace(ALL_TO_ALL, vision_linear_s=2e-5, feature_bytes=1e3)
    batches = [[Sample(str(row), 300 + 97 * (row % 7), 64, ((1, 16, 16),) * (1 + 12 * (row % 5 == 0)))
                for row in range(24 + seed)] for seed in range(2)]
    total_s = {}
    for encoder in ("group", "world", "auto"):
        problems = [checked_problem(samples, cluster, cost, sync=sync, encoder=encoder) for samples in batches]
        plans = plan_data_set(problems)
        total_s[encoder] = sum(plan.predicted_time_s for plan in plans)
        if encoder != "auto":
            assert {plan.vision.apart for plan in plans} == {encoder == "world"}
        assert all(plan.planning_time_s > 0 for plan in plans)
    assert total_s["auto"] <= min(total_s["group"], total_s["world"]) * (1 + 1e-3)


def test_a_data_set_with_a_long_sequence_needs_its_degree_in_every_batch():
    cluster = ClusterSpec(4, 4, 100)
    problems = [checked_problem([Sample("a", length), Sample("b", 20)], cluster, ALL_TO_ALL) for length in (30, 350)]
    assert [group.degree for group in plan_data_set(problems)[0].groups] == [4]
    assert {group.degree for group in plan_batch(problems[0].samples, cluster, ALL_TO_ALL,
                                                 planner="static").groups} == {1}
