"""The ranks that waste least where speeds are unequal, against every list and every run of its ranks."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL

from dhp_ray.planner import ClusterSpec, Sample
from dhp_ray.planner.items import time_s
from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.problem import problem_of
from dhp_ray.planner.step.candidates import best_candidate
from dhp_ray.planner.step.free_ranks import FreeRanks, free_ranks, occupy
from dhp_ray.planner.step.rank_lists import rank_lists

RANKS_PER_NODE = 5


@compiled
def least_seconds(items, num_ranks, machine):
    """By degree: the shortest time of all items."""
    least_s = np.zeros(num_ranks + 1)
    for degree in range(1, num_ranks + 1):
        least_s[degree] = min([time_s(items[row], degree, False, machine.fastest, machine.rates[degree])
                               for row in range(len(items))])
    return least_s


@compiled
def found(items, lowest, makespan, machine, lists, busy, gap_weight):
    """The best candidate on up to a node's ranks, and its ranks."""
    chosen = np.zeros(len(busy), dtype=np.int64)
    ranks = free_ranks(busy, least_seconds(items, len(busy), machine), machine, lists)
    best = best_candidate(
        items[0], lowest, RANKS_PER_NODE, makespan, machine, lists, ranks, gap_weight, chosen
    )
    return best, chosen[: best.degree]


@compiled
def placed(items, makespan, machine, lists, busy, gap_weight):
    """By item, placed one after another: the waste of its candidate, and that of the same search by which no list of
    ranks has been skipped before."""
    wastes, chosen = np.zeros((2, len(items))), np.zeros(len(busy), dtype=np.int64)
    least_s = least_seconds(items, len(busy), machine)
    ranks = free_ranks(busy, least_s, machine, lists)
    for row in range(len(items)):
        afresh = FreeRanks(  # the same order of ranks that become free together
            ranks.free, ranks.by_free, ranks.nodes, ranks.node_free, ranks.listed.copy(), ranks.sorted.copy(),
            lists.following.copy(), np.zeros(len(lists.by_degree)), least_s)
        wastes[1, row] = best_candidate(
            items[row], 1, len(busy), makespan, machine, lists, afresh, gap_weight, chosen
        ).cost
        best = best_candidate(items[row], 1, len(busy), makespan, machine, lists, ranks, gap_weight, chosen)
        wastes[0, row] = best.cost
        if best.degree > 0:
            members = np.sort(chosen[: best.degree])
            crosses = machine.node[members[0]] != machine.node[members[-1]]
            slowest = machine.speeds[members].min()
            end = best.start + time_s(items[row], best.degree, crosses, slowest, machine.rates[best.degree])
            occupy(ranks, members, end, machine, lists)
    return wastes


@compiled
def seconds(items, degree, slowest, machine):
    return time_s(items[0], degree, False, slowest, machine.rates[degree])


def costs_inside_nodes(items, lowest, makespan, machine, busy, gap_weight):
    """Of every candidate, by its ranks: in each node the ranks from each speed on, and of these every run in the order
    in which they get free."""
    costs, compute = dict[tuple[int, ...], float](), items.language_s[0] + items.vision_s[0]
    for begin, end in zip(machine.first[:-1], machine.first[1:]):
        node = sorted(range(begin, end), key=lambda rank: machine.speeds[rank])
        for slowest in sorted(set(machine.speeds[node])):
            free = sorted((rank for rank in node if machine.speeds[rank] >= slowest), key=lambda rank: busy[rank])
            for degree in range(lowest, len(free) + 1):
                time = seconds(items, degree, slowest, machine)
                for last in range(degree, len(free) + 1):
                    ranks = free[last - degree : last]
                    start = busy[ranks[-1]]
                    if start + time <= makespan:
                        cost = sum(machine.speeds[rank] * (time + gap_weight * (start - busy[rank])) for rank in ranks)
                        costs[tuple(sorted(ranks))] = min(cost - compute, costs.get(tuple(sorted(ranks)), math.inf))
    return costs


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.4, 0.7, 0.71, 0.9, 1.0]), st.integers(0, 8)), min_size=6, max_size=15),
       st.integers(1, 4), st.sampled_from([0.25, 1.0]), st.floats(0.2, 3.0))
def test_no_candidate_inside_a_node_wastes_less(ranks, lowest, gap_weight, slack):
    speeds, busy = [speed for speed, _ in ranks], np.array([float(free) for _, free in ranks])
    cluster = ClusterSpec(len(speeds), RANKS_PER_NODE, 8192, (*speeds[:-1], 1.1))  # not all alike
    problem = problem_of([Sample("0", 20_000)], cluster, ALL_TO_ALL, "step")
    items, machine, lists = problem.items, problem.machine, rank_lists(problem.machine)
    makespan = busy.max() + slack * float(seconds(items, lowest, 1.0, machine))
    costs = costs_inside_nodes(items, lowest, makespan, machine, busy, gap_weight)
    best, chosen = found(items, lowest, makespan, machine, lists, busy, gap_weight)
    if costs:
        assert best.cost <= min(costs.values()) + 1e-9
        assert best.cost >= costs[tuple(sorted(chosen))] - 1e-9


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.4, 0.7, 0.71, 0.9, 1.0]), st.floats(0.0, 4.0)), min_size=6, max_size=15),
       st.lists(st.sampled_from([500, 2_000, 8_000, 20_000]), min_size=2, max_size=12), st.sampled_from([0.25, 1.0]),
       st.floats(0.3, 1.5))
def test_lists_that_are_skipped_have_no_better_candidate(ranks, lengths, gap_weight, slack):
    """Items are placed on ranks that become free ever later, until some find no ranks."""
    busy = np.array([free for _, free in ranks])
    cluster = ClusterSpec(len(busy), RANKS_PER_NODE, 8192, (*(speed for speed, _ in ranks[:-1]), 1.1))
    samples = [Sample(str(row), length) for row, length in enumerate(lengths)]
    problem = problem_of(samples, cluster, ALL_TO_ALL, "step")
    items, machine, lists = problem.items, problem.machine, rank_lists(problem.machine)
    total_s = (items.language_s + items.vision_s).sum()
    wastes = placed(items, busy.max() + slack * total_s / len(busy), machine, lists, busy, gap_weight)
    np.testing.assert_allclose(wastes[0], wastes[1], rtol=0, atol=1e-9)
