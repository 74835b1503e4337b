"""The ranks that waste least where speeds are unequal, against every list and every run of its ranks."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from test_dhp import ALL_TO_ALL

from dhp_ray.planner import ClusterSpec, Sample
from dhp_ray.planner.items import time_s
from dhp_ray.planner.problem import problem_of
from dhp_ray.planner.step.candidates import best_candidate
from dhp_ray.planner.step.free_ranks import free_ranks
from dhp_ray.planner.step.rank_lists import rank_lists

RANKS_PER_NODE = 5


@njit
def found(items, lowest, makespan, machine, lists, busy, gap_weight):
    """The best candidate on up to a node's ranks, and its ranks."""
    least_s, chosen = np.zeros(len(busy) + 1), np.zeros(len(busy), dtype=np.int64)
    for degree in range(1, RANKS_PER_NODE + 1):
        least_s[degree] = time_s(items[0], degree, False, machine.fastest, machine.rates[degree])
    ranks = free_ranks(busy, least_s, machine, lists)
    best = best_candidate(
        items[0], lowest, RANKS_PER_NODE, makespan, machine, lists, ranks, gap_weight, chosen
    )
    return best, chosen[: best.degree]


@njit
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
