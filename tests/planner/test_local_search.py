"""The local search of small batches: against every order and degree, and what it hands on."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL, RING

from dhp_ray.planner import ClusterSpec, Sample
from dhp_ray.planner.baselines.static import static
from dhp_ray.planner.items import times_at
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.problem import problem_of
from dhp_ray.planner.step.local_search import alike, best_order, placed_in_order


def makespan_s(order, degree, times, num_ranks):
    free = np.zeros(num_ranks)
    for item in order:
        chosen = np.argsort(free, kind="stable")[:degree[item]]
        free[chosen] = free[chosen].max() + times[degree[item] - 1][item]
    return free.max()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(50, 24_000), min_size=1, max_size=4), st.integers(2, 3),
       st.sampled_from([ALL_TO_ALL, RING]))
def test_small_enough_to_try_all(lengths, num_ranks, cost):
    cluster = ClusterSpec(num_ranks, 8, 8192)
    lengths = [length for length in lengths if length <= cluster.max_tokens] or [5]
    problem = problem_of([Sample(str(row), length) for row, length in enumerate(lengths)], cluster, cost, "step")
    times = [times_at(problem.items, degree, problem.machine) for degree in range(1, num_ranks + 1)]
    best_s = min(makespan_s(order, degree, times, num_ranks) for order in permutations(range(len(lengths)))
                 for degree in product(*(range(least, num_ranks + 1) for least in problem.items.minimum_degree)))
    ordered = best_order(problem.items, static(problem), problem.machine, 0.0)
    assert ordered.makespan_s == pytest.approx(best_s)
    # packs may save what one pays once
    assert time_of(problem, placed_in_order(ordered, problem.items,
                                            problem.machine)) - cost.fixed_s <= best_s * (1 + 1e-9)


def test_what_runs_one_after_the_other_is_one_pack():
    problem = problem_of([Sample(str(row), 3000) for row in range(6)], ClusterSpec(2, 8, 8192), ALL_TO_ALL, "step")
    schedule = placed_in_order(best_order(problem.items, static(problem), problem.machine, 0.0), problem.items,
                               problem.machine)
    assert sorted(np.diff(schedule.first_row).tolist()) == [1, 1, 2, 2]  # three sequences a rank, two fit together


def test_only_where_it_does_not_matter_which_ranks_form_a_group():
    def found(cluster, cost):
        return alike(problem_of([Sample("0", 5)], cluster, cost, "step").machine)

    assert found(ClusterSpec(8, 8, 100), RING)
    assert found(ClusterSpec(16, 8, 100), ALL_TO_ALL)  # its table knows no nodes
    assert found(ClusterSpec(4, 1, 100), RING)
    assert not found(ClusterSpec(16, 8, 100), RING)
    assert not found(ClusterSpec(2, 8, 100, (1.0, 0.5)), ALL_TO_ALL)
