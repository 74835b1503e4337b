"""Lists of ranks of like speed: what is in them, and that plans made with them are as short as an exhaustive search
over speeds made them, in far less time.
"""


import numpy as np
import pytest
from test_dhp import ALL_TO_ALL, bimodal

from dhp_ray.planner import ClusterSpec, CostModel, Sample, plan_batch
from dhp_ray.planner.problem import problem_of
from dhp_ray.planner.step.rank_lists import rank_lists


def lists_of(speeds, ranks_per_node):
    cluster = ClusterSpec(len(speeds), ranks_per_node, 100, tuple(speeds))
    return rank_lists(problem_of([Sample("0", 5)], cluster, ALL_TO_ALL, "step").machine)


def for_groups_of(lists, degree, crosses):
    kind = 2 * degree + crosses
    return [lists.ranks[lists.first[index]:lists.first[index + 1]].tolist()
            for index in lists.by_degree[lists.begin[kind]:lists.begin[kind + 1]]]


def test_inside_a_node_every_rank_and_all_that_are_faster():
    lists = lists_of([1.0, 0.9, 1.1, 1.0, 0.5, 1.0], 4)
    # stretched by 1, 1.9 / 1.8 and 1.5 / 1.0
    assert for_groups_of(lists, 2, False) == [[0, 3, 2], [1, 0, 3, 2], [4, 5]]
    assert for_groups_of(lists, 4, False) == [[1, 0, 3, 2]]
    assert for_groups_of(lists, 6, True) == [[4, 1, 0, 3, 5, 2]]


def test_a_list_has_a_head_where_another_one_is_the_same_without_it():
    lists = lists_of([1.0, 0.9, 1.1, 1.0, 0.5, 1.0], 4)
    heads = [(lists.ranks[begin:end].tolist(), head)
             for begin, end, head in zip(lists.first[:-1], lists.first[1:], lists.head.tolist())]
    assert heads[:5] == [([1, 0, 3, 2], 1), ([0, 3, 2], -1), ([2], 2), ([4, 5], 4), ([5], 5)]  # 0 and 3 are as fast
    assert {head for _, head in heads[5:]} == {-1}  # runs of the cluster


def test_ranks_that_are_equally_fast_need_no_lists():
    assert not len(lists_of([1.0] * 8, 4).ranks)


def test_every_degree_has_lists_and_a_rank_is_in_few():
    speeds = np.random.default_rng(0).uniform(0.4, 1.2, 1000)
    lists = lists_of(speeds, 8)
    for degree in (1, 16, 17, 64, 65, 256, 257, 1000):
        listed = for_groups_of(lists, degree, True)
        assert listed
        assert all(len(ranks) >= degree for ranks in listed)
        assert degree > 256 or len({rank for ranks in listed for rank in ranks}) == 1000
    assert np.diff(lists.first_of).max() <= 8 + 3 * 16


FORMER_S = {(64, "spread"): 6.2364, (64, "wide"): 7.6614, (64, "third"): 6.6721, (512, "spread"): 8.1074,
            (512, "wide"): 9.7127, (512, "third"): 8.7271,
            (4096, "spread"): 7.3740, (4096, "wide"): 8.6859, (4096, "third"): 7.9588}
"""Makespans of the search over up to 16 speeds in the whole cluster and all in every node, which took 20 s at 4,096
ranks.
"""


@pytest.mark.parametrize(("num_ranks", "kind"), FORMER_S)
def test_as_short_as_by_an_exhaustive_search(num_ranks, kind):
    random = np.random.default_rng(1)
    speeds = {"spread": np.clip(random.normal(1.0, 0.05, num_ranks), 0.7, 1.3),
              "third": np.where(np.arange(num_ranks) % 8 == 5, 1 / 3, 1.0),
              "wide": np.random.default_rng(1).uniform(0.4, 1.2, num_ranks)}[kind]
    plan = plan_batch(bimodal(4 * num_ranks, num_ranks), ClusterSpec(num_ranks, 8, 8192, tuple(speeds)), ALL_TO_ALL)
    assert plan.predicted_time_s <= 1.01 * FORMER_S[num_ranks, kind]


SLOW = CostModel(1e-9, 1e-4, 1.5e5, 0.2, {"intra": 4e11, "inter": 5e10}, communication="ring", overlap=0.9,
                 latency_s=1e-3, pack_s=0.02)


@pytest.mark.parametrize("planner", ["dhp", "dhp_quick"])
@pytest.mark.parametrize(("num_slow", "speed", "needed"), [(1, 0.8, 61), (1, 0.25, 61), (5, 0.5, 58), (3, 1e-6, 61)])
def test_a_sequence_on_nearly_all_ranks_leaves_out_the_slow_ones(num_slow, speed, needed, planner):
    """The step takes at most 1.05 of the time that it takes on the other ranks alone."""
    random, nodes = np.random.default_rng(0), tuple(rank // 8 for rank in range(64))
    samples = [Sample("long", needed * 4096 - 5)] + [
        Sample(str(number), int(tokens)) for number, tokens in enumerate(np.exp(random.normal(7.5, 1.0, 256)) + 16)]
    speeds = tuple(speed if 11 <= rank < 11 + num_slow else 1.0 for rank in range(64))
    rest = tuple(node for node, of_rank in zip(nodes, speeds) if of_rank == 1.0)
    found = plan_batch(samples, ClusterSpec(64, 8, 4096, speeds, nodes), SLOW, planner=planner)
    without = plan_batch(samples, ClusterSpec(len(rest), 8, 4096, (), rest), SLOW)
    assert found.predicted_time_s <= 1.05 * without.predicted_time_s
