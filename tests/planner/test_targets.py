"""Packs under a target makespan: like a slow and obvious version, valid, and timed as the finished plan is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL, RING

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.bound import bounded
from dhp_ray.planner.problem import Problem, problem_of
from dhp_ray.planner.search.batch import batch_of
from dhp_ray.planner.search.targets import NO_GROUPS, build, shortest_under_targets
from dhp_ray.planner.timeline import time_of


def slow_end_s(problem: Problem, target_s: float, least: int) -> float:
    """The makespan of sequences of several ranks each: largest first, on ranks that are free one after another, where
    they waste least rank-seconds, or, if none end by the target, where they end first."""
    free = [0.0] * problem.cluster.num_ranks
    for row in sorted(range(len(problem.samples)), key=lambda row: -problem.samples[row].num_tokens):
        by_free, choices = sorted(range(len(free)), key=lambda rank: free[rank]), []
        tokens = problem.samples[row].num_tokens
        for degree in range(max(least, int(problem.items.minimum_degree[row])), len(free) + 1):
            seconds = problem.cost.pack_time_s([tokens], range(degree), problem.cluster)
            for first in range(len(free) - degree + 1):
                ranks = by_free[first : first + degree]
                start_s = free[ranks[-1]]
                waste = degree * seconds + sum(start_s - free[rank] for rank in ranks)
                choices.append((start_s + seconds, waste, degree, ranks))
        in_time = [choice for choice in choices if choice[0] <= target_s]
        end_s, _, _, ranks = (min(in_time, key=lambda choice: (round(choice[1], 9), -choice[0], choice[2])) if in_time
                              else min(choices, key=lambda choice: (choice[0], choice[2])))
        for rank in ranks:
            free[rank] = end_s
    return max(free)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(100, 6000), min_size=1, max_size=12, unique=True), st.integers(2, 8),
       st.floats(1.0, 2.0))
def test_sequences_of_several_ranks_are_placed_like_the_slow_ones(
    lengths: list[int], num_ranks: int, over: float) -> None:
    cost = CostModel(quadratic_s=0.0, linear_s=2e-4, comm_bytes_per_token=1e6, fixed_s=0.0, latency_s=1e-3,
                     bandwidth_bytes_per_s={2: 1e11})
    samples = [Sample(str(row), length) for row, length in enumerate(lengths)]
    problem = bounded(problem_of(samples, ClusterSpec(num_ranks, num_ranks, 8000), cost, "step"))
    target_s = problem.lower_bound_s * over
    end_s = build(batch_of(problem), target_s, np.inf, 2, False, NO_GROUPS, 0.0)[-1]
    assert end_s == pytest.approx(slow_end_s(problem, target_s, 2))


@pytest.mark.parametrize("cost", [ALL_TO_ALL, RING])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=30), st.integers(1, 10), st.integers(1, 4),
       st.sampled_from([2, 3, 16]), st.booleans(), st.randoms(use_true_random=False))
def test_a_plan_holds_each_sequence_once_in_memory_and_takes_the_seconds_of_the_build(
    cost: CostModel, lengths: list[int], num_ranks: int, least: int, node: int, unequal: bool, random: object) -> None:
    speeds = tuple(random.uniform(0.4, 1.2) for _ in range(num_ranks)) if unequal else ()  # type: ignore[attr-defined]
    cluster = ClusterSpec(num_ranks, node, 2000, speeds)
    samples = [Sample(str(row), length) for row, length in enumerate(lengths) if length <= cluster.max_tokens]
    if not samples:
        return
    problem = bounded(problem_of(samples, cluster, cost, "step"))
    batch, bound_s, least = batch_of(problem), problem.lower_bound_s - cost.fixed_s, min(least, num_ranks)
    schedule, _ = shortest_under_targets(batch, bound_s, np.inf, least, False)
    assert schedule is not None
    assert sorted(schedule.rows.tolist()) == list(range(len(samples)))
    held = np.add.reduceat(problem.items.tokens[schedule.rows], schedule.first_row[:-1])
    assert (held <= np.diff(schedule.first_rank) * 2000).all()
    assert (np.diff(schedule.first_rank) >= least).all()
    seconds = time_of(problem, schedule) - cost.fixed_s
    assert seconds >= bound_s * (1 - 1e-9)
    shorter, _ = shortest_under_targets(batch, bound_s, seconds * 0.999, least, True)
    assert shorter is None or time_of(problem, shorter) - cost.fixed_s <= seconds


@pytest.mark.parametrize(("lengths", "ranks", "cost", "seconds"), [
    ([12000, 12000, 9000], (8, 4, 4000), CostModel(
        5e-9, 2e-4, 1e5, 0.0, {"intra": {2: 2e10, 3: 1e8, 4: 5e7}, "inter": {2: 1e10}}, communication="ring",
        latency_s=1e-4), 1.0911),
    ([5000, 7000, 6000, 15000], (4, 2, 4000), CostModel(
        1e-9, 1e-5, 1e6, 0.0, {"intra": {2: 1e8, 4: 1e9}, "inter": {2: 1e9, 4: 1e8}}), 43.18)])
def test_links_across_nodes_may_be_faster_than_those_inside(
    lengths: list[int], ranks: tuple[int, int, int], cost: CostModel, seconds: float) -> None:
    samples = [Sample(str(row), length) for row, length in enumerate(lengths)]
    assert plan_batch(samples, ClusterSpec(*ranks), cost, planner="dhp_quick").predicted_time_s <= seconds * 1.0001
