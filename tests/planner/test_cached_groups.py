"""The existing group that wastes least, against the cost of each."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dhp import ALL_TO_ALL

from dhp_ray.planner import ClusterSpec, Sample
from dhp_ray.planner.items import time_s
from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.problem import problem_of
from dhp_ray.planner.step.cached_groups import CachedGroups, best_cached_group

NUM_RANKS, RANKS_PER_NODE, CAPACITY = 8, 4, 100


@compiled
def best(items, lowest, highest, makespan, machine, free, cached, gap_weight, limit):
    """The best group, and its ranks."""
    chosen = np.zeros(len(free), dtype=np.int64)
    found = best_cached_group(items[0], lowest, highest, makespan, machine, free, cached, len(cached.first) - 1,
                              gap_weight, limit, chosen)
    return found, chosen[: found.degree]


@compiled
def seconds(items, degree, crosses, speed, machine):
    return time_s(items[0], degree, crosses, speed, machine.rates[degree])


GROUPS = st.lists(st.sets(st.integers(0, NUM_RANKS - 1), min_size=1), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.lists(st.sampled_from([0.0, 0.1, 0.25]), min_size=NUM_RANKS, max_size=NUM_RANKS),
       st.lists(st.sampled_from([0.8, 1.0]), min_size=NUM_RANKS, max_size=NUM_RANKS), st.integers(80, 800),
       st.sampled_from([0.25, 1.0]), st.floats(0.2, 1.5), st.integers(1, 4),
       st.sampled_from([0.0512345, 0.512345, np.inf]))
def test_the_group_that_wastes_least(groups, free, speeds, tokens, gap_weight, makespan, lowest, limit):
    cluster = ClusterSpec(NUM_RANKS, RANKS_PER_NODE, CAPACITY, tuple(speeds))
    problem = problem_of([Sample("a", tokens)], cluster, ALL_TO_ALL, "step")
    items, machine = problem.items, problem.machine
    groups = [sorted(group) for group in groups]
    cached = CachedGroups(np.array([rank for group in groups for rank in group]),
                          np.cumsum([0, *map(len, groups)]))
    found, ranks = best(items, lowest, 6, makespan, machine, np.array(free), cached, gap_weight, limit)
    wastes = []
    for group in groups:
        crosses = group[0] // RANKS_PER_NODE != group[-1] // RANKS_PER_NODE
        start, of_group = max(free[rank] for rank in group), [speeds[rank] for rank in group]
        time = seconds(items, len(group), crosses, min(of_group), machine)
        idle = sum((start - free[rank]) * speeds[rank] for rank in group)
        waste = gap_weight * idle + time * sum(of_group) - float(items[0].language_s)
        if lowest <= len(group) <= 6 and start + time <= makespan and waste <= limit:
            wastes.append((waste, group))
    assert (found.degree > 0) == bool(wastes)
    if wastes:
        assert np.isclose(found.cost, min(wastes)[0], rtol=1e-9, atol=1e-12)
        assert ranks.tolist() in groups
        assert found.start == max(free[rank] for rank in ranks)
