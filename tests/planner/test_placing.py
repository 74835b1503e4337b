"""Ranks for the groups of a micro-batch: of the pool, inside nodes, whole nodes."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL, RING

from dhp_ray.planner import ClusterSpec, Sample
from dhp_ray.planner.problem import problem_of
from dhp_ray.planner.schedule import firsts_of
from dhp_ray.planner.search.placing import cached_groups_of, ranks_of
from dhp_ray.planner.search.rounds import places_of


def placed(degrees, cluster, pool=(), cost=ALL_TO_ALL):
    problem = problem_of([Sample("0", 5)], cluster, cost, "micro_batch", pool)
    first = firsts_of(degrees)
    flat = ranks_of(first, problem.machine, places_of(problem.machine).rank, cached_groups_of(problem)).tolist()
    return [tuple(flat[begin:end]) for begin, end in pairwise(first)]


@pytest.mark.parametrize(("degrees", "expected"), [
    ([2, 4, 2], [(4, 5), (0, 1, 2, 3), (6, 7)]), ([1, 3, 3, 1], [(3,), (0, 1, 2), (4, 5, 6), (7,)]),
    ([2, 6], [(6, 7), (0, 1, 2, 3, 4, 5)]),
    ([3, 3, 2], [(0, 1, 2), (4, 5, 6), (3, 7)])])
def test_inside_nodes_where_they_fit(degrees, expected):
    assert placed(degrees, ClusterSpec(8, 4, 100)) == expected


def test_a_group_of_the_pool_is_taken_the_newest_first():
    pool = ((0, 4), (1, 5), (0, 9), (2, 3, 4), (6, 7))
    assert placed([2, 2, 2, 2], ClusterSpec(8, 4, 100), pool) == [(6, 7), (1, 5), (0, 4), (2, 3)]
    assert placed([3, 2], ClusterSpec(8, 4, 100), pool) == [(2, 3, 4), (6, 7)]


def test_a_group_of_the_pool_that_crosses_slower_links_is_taken_only_if_no_node_has_room():
    pool = ((0, 1), (3, 4))
    assert placed([2], ClusterSpec(8, 4, 100), pool) == [(3, 4)]  # all links are equal
    assert placed([2], ClusterSpec(8, 4, 100), pool, RING) == [(0, 1)]
    assert placed([2], ClusterSpec(8, 4, 100), pool[1:], RING) == [(0, 1)]
    assert placed([3, 3, 2], ClusterSpec(8, 4, 100), ((2, 6), (3, 7)), RING) == [(0, 1, 2), (4, 5, 6), (3, 7)]
    assert placed([6], ClusterSpec(8, 4, 100), ((1, 2, 3, 4, 5, 6),), RING) == [(1, 2, 3, 4, 5, 6)]


def test_with_unequal_speeds_a_group_has_the_ranks_that_its_time_was_predicted_for():
    assert placed([2, 1, 1], ClusterSpec(4, 4, 100, (0.5, 1.0, 0.9, 1.2)), ((0, 1),)) == [(1, 3), (2,), (0,)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 8), st.randoms(use_true_random=False))
def test_no_rank_twice(degrees, ranks_per_node, random):
    cluster = ClusterSpec(sum(degrees) + random.randint(0, 3), ranks_per_node, 100)
    pool = [tuple(sorted(random.sample(range(cluster.num_ranks), min(size, cluster.num_ranks))))
            for size in (2, 2, 3, 4)]
    groups = placed(degrees, cluster, pool)
    assert [len(group) for group in groups] == degrees
    assert all(group == tuple(sorted(group)) for group in groups)
    flat = [rank for group in groups for rank in group]
    assert len(set(flat)) == len(flat)
    assert max(flat) < cluster.num_ranks
