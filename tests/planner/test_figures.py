"""The figures of benchmarks/planner.py that are promised: beside the peers, near the bound, in time, in memory, and
with groups used again.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.planner import PEERS, SKETCH, bimodal, drawn, gap_of, planned, published_cost, reused

needs_data = pytest.mark.skipif("DHP_RAY_TEST_DATA" not in os.environ,
                                reason="DHP_RAY_TEST_DATA names no folder with cost/ and lengths/")
SETS = ("bimodal", "wikipedia", "internvl", "internvid")


@needs_data
@pytest.mark.seconds
def test_ahead_of_every_peer():
    cost, below_main, far_ahead = published_cost(), 0, 0
    for (count, num_ranks), (main, *others) in PEERS.items():
        lengths = bimodal(count, num_ranks)
        step, micro_batched = (planned(lengths, num_ranks, cost, sync=sync) for sync in ("step", "micro_batch"))
        assert micro_batched.predicted_time_s <= min(others)
        assert step.predicted_time_s <= SKETCH.get((count, num_ranks), np.inf)
        below_main += micro_batched.predicted_time_s < main
        best = min(main, *others)
        # where the bound itself forbids it
        far_ahead += step.predicted_time_s <= 0.8 * best or step.lower_bound_s > 0.8 * best
    assert below_main >= 6
    assert far_ahead == len(PEERS)


def worst_gap(name, each, num_ranks, seeds, cost):
    return max(gap_of(planned(drawn(name, each * num_ranks, num_ranks, seed), num_ranks, cost), cost) for seed in seeds)


@needs_data
@pytest.mark.parametrize("name", SETS)
def test_near_the_bound_on_real_lengths(name):
    cost = published_cost()
    for each, allowed in ((2, 0.15), (4, 0.10), (8, 0.01)):
        assert worst_gap(name, each, 64, range(2), cost) <= allowed
        assert worst_gap(name, each, 8, range(2), cost) <= allowed


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [8, 64, 512])
def test_near_the_bound_everywhere(num_ranks):
    cost = published_cost()
    for name in SETS:
        for each, allowed in ((2, 0.15), (4, 0.10), (8, 0.01), (16, 0.01)):
            assert worst_gap(name, each, num_ranks, range(5), cost) <= allowed


@needs_data
def test_unequal_speeds_stay_near_their_bound():
    cost, third = published_cost(), (1.0,) * 5 + (1 / 3,) + (1.0,) * 2
    for seed in range(3):
        spread = tuple(np.clip(np.random.default_rng(seed + 100).normal(1, 0.05, 64), 0.7, 1.3))
        assert gap_of(planned(drawn("bimodal", 64, 8, seed), 8, cost, speeds=third), cost) <= 0.03
        assert gap_of(planned(drawn("bimodal", 512, 64, seed), 64, cost, speeds=spread), cost) <= 0.03


@needs_data
@pytest.mark.parametrize("count", [256, 512])
def test_groups_of_the_pool_are_used_again_on_wikipedia_lengths(count):
    uses, hits, longer = reused(count, 60, published_cost())
    assert uses > 150
    assert hits >= 0.94 * uses  # the others are groups of one long sequence each, of sizes that the pool lacks
    assert longer <= 0.01


MANY_RANKS = """
import resource, sys
from dhp_ray.planner import PLANNERS, ClusterSpec, CostModel, Sample, plan_batch, warm_up
cost = CostModel(5e-9, 2e-4, 2e6, 0.6, {2: 1.2e11, 8: 1e11, 16: 1e10})
warm_up()
samples = [Sample(str(row), 30_000 if row % 50 == 0 else 500 + row) for row in range(300)]
def plan_all(num_ranks):
    for planner in PLANNERS:
        for sync in ("step", "micro_batch"):
            plan_batch(samples, ClusterSpec(num_ranks, 8, 8192), cost, planner=planner, sync=sync)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(plan_all(64), plan_all(8192))
"""


@pytest.mark.slow
def test_no_memory_that_grows_with_ranks_squared():
    """A single array of ranks x ranks bytes would be 64 MiB here."""
    few, many = map(int, subprocess.run([sys.executable, "-c", MANY_RANKS], check=True, capture_output=True,
                                        text=True).stdout.split())
    assert many - few < 50
