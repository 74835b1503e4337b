"""Exchanges of a step's critical path: shorter, the same groups, memory kept, near a slow search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL, RING
from test_exchanges import best_exchange, check, packs_of, schedule_of

from dhp_ray.planner import ClusterSpec, CostModel, Sample, checked_problem
from dhp_ray.planner.baselines.static import Layout, uniform
from dhp_ray.planner.bound import bounded
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.schedule import Schedule, firsts_of
from dhp_ray.planner.step.critical_path import with_shorter_path
from dhp_ray.planner.step.search import dhp_step

TOKENS_ALONE = CostModel(0.0, linear_s=1.0, comm_bytes_per_token=0.0, fixed_s=0.0, bandwidth_bytes_per_s={2: 1.0})


def test_the_module_s_example() -> None:
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((5, 4, 3, 3, 4, 3, 2, 2))]
    problem = checked_problem(samples, ClusterSpec(2, 2, 9), TOKENS_ALONE, sync="step")
    before = schedule_of([[0, 1], [4, 5], [2, 3], [6, 7]], [1, 1, 1, 1], [0, 0, 1, 1])
    after = with_shorter_path(problem, before)
    assert (time_of(problem, before), time_of(problem, after)) == (15.0, 13.0)


def test_a_pack_that_waits_is_shortened_by_the_pack_it_waits_for() -> None:
    """Both ranks run 8 s together after 1 s on rank 0 and 6 s on rank 1, which gives rank 0 a sequence."""
    samples = [Sample(str(row), tokens) for row, tokens in enumerate((1, 5, 1, 8))]
    problem = checked_problem(samples, ClusterSpec(2, 2, 9), TOKENS_ALONE, sync="step")
    before = Schedule(np.array([0, 1, 2, 3]), firsts_of([1, 2, 1]), np.array([0, 1, 0, 1]), firsts_of([1, 1, 2]),
                      np.zeros(3, dtype=np.int64))
    after = with_shorter_path(problem, before)
    assert (time_of(problem, before), time_of(problem, after)) == (10.0, 9.0)
    assert sorted(map(len, packs_of(after))) == [1, 1, 2]


@pytest.mark.parametrize("by_search", [True, False])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6000), st.integers(0, 3)), min_size=2, max_size=40), st.integers(1, 9),
       st.integers(1, 3), st.sampled_from([ALL_TO_ALL, RING]), st.booleans(), st.integers(0, 2**32 - 1))
def test_shorter_with_the_same_groups_in_their_memory(
    by_search: bool, lengths: list[tuple[int, int]], num_ranks: int, degree: int, cost: CostModel, uneven: bool,
    seed: int,
) -> None:
    speeds = tuple(np.random.default_rng(seed).uniform(0.5, 1.0, num_ranks)) if uneven else ()
    cost = replace(cost, vision_linear_s=1e-4, encoder_pass_s=0.01, pack_s=0.02)
    samples = [Sample(str(row), tokens, 0, tuple((1, 16, 8 * (row % 3 + image)) for image in range(1, images + 1)))
               for row, (tokens, images) in enumerate(lengths)]
    problem = bounded(checked_problem(samples, ClusterSpec(num_ranks, 4, 8192, speeds), cost, sync="step"))
    before = dhp_step(problem)[0] if by_search else uniform(problem, Layout(min(degree, num_ranks), 8192))
    check(problem, before, with_shorter_path)


def test_near_a_slow_search_that_always_makes_the_best_exchange() -> None:
    """Five sequences a rank in packs of two; the best exchange of all is looked for by exact times."""
    ratios = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        samples = [Sample(str(row), int(tokens), 0, ((1, 16, 16),) * int(images))
                   for row, (tokens, images) in enumerate(zip(generator.integers(1000, 3000, 15),
                                                              generator.integers(0, 3, 15)))]
        problem = checked_problem(samples, ClusterSpec(3, 4, 4096),
                                  replace(ALL_TO_ALL, vision_linear_s=1e-4, pack_s=0.05), sync="step")
        before = uniform(problem, Layout(1, 4096))
        slow = before
        while (better := best_exchange(problem, slow)) is not None:
            slow = better
        ratios.append(time_of(problem, with_shorter_path(problem, before)) / time_of(problem, slow))
    assert max(ratios) < 1.02
    assert np.mean(ratios) < 1.003
