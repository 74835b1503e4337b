"""Items of one rank in packs: what a trial finds room for takes no longer than its makespan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner import ClusterSpec, CostModel, Sample, bounded, checked_problem
from dhp_ray.planner.pricing import time_of
from dhp_ray.planner.primitives.packing import unpacked
from dhp_ray.planner.step import search as step_search
from dhp_ray.planner.step.cached_groups import cached_groups_of
from dhp_ray.planner.step.rank_lists import rank_lists

CAPACITY = 100


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(3, 8), st.sampled_from([1e-3, 0.05]),
       st.randoms(use_true_random=False))
def test_a_schedule_takes_no_longer_than_the_trial_that_found_it(lengths, num_ranks, pack_s, random):
    """On equal ranks, images and packs of their own price included; of single sequences and of packs alike."""
    cost = CostModel(1e-6, 1e-3, 100.0, 0.0, {2: 1e5}, pack_s=pack_s, encoder_pass_s=0.02, vision_linear_s=1e-3)
    samples = [Sample(str(row), length, 0, ((1, 1, random.randint(1, 60)),) * random.choice((0, 0, 1, 3)))
               for row, length in enumerate(lengths)]
    problem = bounded(checked_problem(samples, ClusterSpec(num_ranks, num_ranks, CAPACITY), cost, sync="step"))
    machine = problem.machine
    for items, packs in step_search.item_sets(problem):
        search = step_search.Search(items, packs, machine, rank_lists(machine), cached_groups_of(problem),
                                    problem.lower_bound_s)
        for effort in (search.quick, search.thorough):
            found = search.shortest(search.tolerance, effort)
            schedule = unpacked(search.scheduled(found), packs)
            assert time_of(problem, schedule) <= found.makespan_s * (1 + 1e-9)


def test_packs_that_cannot_hold_two_items_each_cost_their_own() -> None:
    """Five items of 60 tokens on two ranks: a rank has three packs, though two would hold as many tokens."""
    cost = CostModel(0.0, 1e-3, 1e9, 0.0, {2: 1e9}, pack_s=0.05)  # a ring costs a second a token
    samples = [Sample(str(row), 60, 0, ()) for row in range(5)]
    problem = bounded(checked_problem(samples, ClusterSpec(2, 2, CAPACITY), cost, sync="step"))
    machine, [(items, packs), *_] = problem.machine, step_search.item_sets(problem)
    search = step_search.Search(items, packs, machine, rank_lists(machine), cached_groups_of(problem),
                                problem.lower_bound_s)
    found = search.shortest(search.tolerance, search.thorough)
    assert found.makespan_s == pytest.approx(3 * (0.06 + 0.05), rel=2e-3)
    assert sorted(np.diff(search.scheduled(found).first_row).tolist()) == [1] * 5
