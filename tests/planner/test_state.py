"""A plan while it is improved is timed as the finished plan is, whatever changes it has been through."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL, RING

from dhp_ray.planner import ClusterSpec, Sample
from dhp_ray.planner.plan.cluster import Recomputation
from dhp_ray.planner.problem import Problem, problem_of
from dhp_ray.planner.schedule import Schedule, firsts_of
from dhp_ray.planner.search.batch import batch_of
from dhp_ray.planner.search.improve import improve
from dhp_ray.planner.search.state import schedule_of, state_of
from dhp_ray.planner.timeline import time_of


def random_case(seed: int, sync: str) -> tuple[Problem, Schedule]:
    """A batch and some valid plan of it."""
    random = np.random.default_rng(seed)
    num_ranks, node = int(random.integers(1, 12)), int(random.integers(1, 9))
    speeds = tuple(random.uniform(0.4, 1.2, num_ranks)) if random.random() < 0.4 else ()
    recomputation = Recomputation(0.9, 1000, 2000, 1000) if random.random() < 0.4 else Recomputation()
    cluster = ClusterSpec(num_ranks, node, 1000, speeds, recomputation=recomputation)
    samples = [Sample(str(row), int(random.integers(1, 900)), 0, ((1, 8, int(random.integers(4, 40))),) * count)
               for row, count in enumerate(random.integers(0, 3, int(random.integers(1, 25))))]
    problem = problem_of(samples, cluster, RING if random.random() < 0.5 else ALL_TO_ALL, sync)
    rows, packs, ranks = random.permutation(len(samples)).tolist(), list[list[int]](), list[list[int]]()
    micro_batch, free = list[int](), list[int]()
    while rows:
        degree, number = int(random.integers(1, num_ranks + 1)), micro_batch[-1] if micro_batch else 0
        if sync == "step" or degree > len(free):
            free = random.permutation(num_ranks).tolist()
            number += int(sync == "micro_batch" and bool(micro_batch))
        chosen, free = sorted(free[:degree]), free[degree:]
        pack = [rows.pop()]
        while rows and random.random() < 0.6:
            if sum(samples[row].num_tokens for row in [*pack, rows[-1]]) > 1000 * degree:
                break
            pack.append(rows.pop())
        packs.append(sorted(pack))
        ranks.append(chosen)
        micro_batch.append(number)
    (row, first_row), (rank, first_rank) = (
        (np.concatenate([np.array(each) for each in pieces]), firsts_of([len(each) for each in pieces]))
        for pieces in (packs, ranks))
    return problem, Schedule(row, first_row, rank, first_rank, np.array(micro_batch))


def seconds_of(problem: Problem, slot_s: np.ndarray) -> float:
    return float(slot_s.sum()) + (problem.cost.fixed_s if problem.sync == "step" else 0.0)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_state_takes_the_seconds_of_its_schedule(sync: str, seed: int) -> None:
    problem, schedule = random_case(seed, sync)
    batch = batch_of(problem)
    state = state_of(batch, schedule)
    assert seconds_of(problem, state.slot_s) == pytest.approx(time_of(problem, schedule))
    for given_array, kept in zip(schedule, schedule_of(batch, state)):
        np.testing.assert_array_equal(given_array, kept)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_an_improved_plan_is_valid_no_longer_and_timed_as_it_is(sync: str, threshold: float, seed: int) -> None:
    problem, schedule = random_case(seed, sync)
    batch = batch_of(problem)._replace(capacity=problem.cluster.most_tokens_per_rank)
    state = state_of(batch, schedule)
    improve(batch, state, 0.0, 500, 4, threshold)
    after = schedule_of(batch, state)
    assert seconds_of(problem, state.slot_s) == pytest.approx(time_of(problem, after))
    assert time_of(problem, after) <= time_of(problem, schedule) * (1 + 1e-9)
    assert sorted(after.rows.tolist()) == list(range(len(problem.samples)))
    held = np.add.reduceat(problem.items.tokens[after.rows], after.first_row[:-1])
    assert (held <= np.diff(after.first_rank) * problem.cluster.most_tokens_per_rank).all()
    for number in range(int(after.micro_batch[-1]) + 1):
        of_slot = [rank for group in np.nonzero(after.micro_batch == number)[0]
                   for rank in after.ranks[after.first_rank[group] : after.first_rank[group + 1]]]
        assert sync == "step" or len(of_slot) == len(set(of_slot))
