"""Planning beside other threads: no lock of Python's is held in the loops, two plans at once are two plans, and there
is a planner for when time is up.
"""

import importlib
import os
import pkgutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from numba.core.registry import CPUDispatcher
from test_dhp import ALL_TO_ALL, RING, bimodal

import dhp_ray.planner
from dhp_ray.planner import LAST_RESORT, ClusterSpec, plan_batch


def test_compiled_loops_release_the_lock():
    modules = [importlib.import_module(module.name)
               for module in pkgutil.walk_packages(dhp_ray.planner.__path__, "dhp_ray.planner.")]
    loops = {value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)}
    entries = [loop for loop in loops if not loop.targetoptions.get("no_cpython_wrapper")]
    assert len(entries) > 8
    assert all(loop.targetoptions.get("nogil") for loop in entries)


WARM = """
from numba.core.registry import CPUDispatcher
import importlib, pkgutil, sys
import dhp_ray.planner
from dhp_ray.planner import PLANNERS, ClusterSpec, plan_batch, warm_up
sys.path.insert(0, {folder!r})
from test_dhp import ALL_TO_ALL, RING, bimodal
warm_up()
found = pkgutil.walk_packages(dhp_ray.planner.__path__, "dhp_ray.planner.")
modules = [importlib.import_module(module.name) for module in found]
loops = {{value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)}}
counts = {{loop: len(loop.signatures) for loop in loops}}
uneven = (1.0, 0.9, 0.8, 1.1, 1.0, 0.4)
for cost, count, ranks, speeds in {cases}:
    for sync in ("step", "micro_batch"):
        for planner in PLANNERS:
            cluster = ClusterSpec(ranks, 8, 8192, speeds)
            plan_batch(bimodal(count, ranks), cluster, cost, planner=planner, sync=sync, pool=((0, 1),))
print([loop.py_func.__qualname__ for loop in loops if len(loop.signatures) > counts[loop]])
"""


@pytest.mark.parametrize("cases", [
    "(ALL_TO_ALL, 512, 64, ()), (RING, 9, 4, ()), (ALL_TO_ALL, 30, 6, uneven), (RING, 30, 6, uneven)",
    pytest.param("(RING, 512, 64, ()), (ALL_TO_ALL, 9, 4, ())", marks=pytest.mark.slow)])
def test_after_the_warm_up_nothing_is_compiled(cases):
    code = WARM.format(folder=os.path.dirname(__file__), cases=cases)
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("num_seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_two_threads_plan_at_once(num_seeds):
    cases = [(bimodal(300, 24, seed), ClusterSpec(24, 8, 8192), cost, sync)
             for seed in range(num_seeds) for cost in (ALL_TO_ALL, RING) for sync in ("step", "micro_batch")]
    alone = [plan_batch(samples, cluster, cost, sync=sync).groups for samples, cluster, cost, sync in cases]
    found: dict[tuple[int, int], object] = {}

    def work(thread: int) -> None:
        for turn in range(len(cases)):
            index = (turn + thread * 5) % len(cases)
            samples, cluster, cost, sync = cases[index]
            found[thread, index] = plan_batch(samples, cluster, cost, sync=sync).groups

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get((thread, index)) for thread in range(2) for index in range(len(cases))] == alone * 2


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize("cost", [ALL_TO_ALL, RING])
def test_the_last_resort_is_valid(sync, cost):
    generator = np.random.default_rng(0)
    for count, num_ranks, speeds in ((2048, 1024, ()), (40, 6, ()), (3, 7, ()),
                                     (100, 12, tuple(generator.uniform(0.3, 1.2, 12))), (5, 1, (0.4,))):
        cluster, samples = ClusterSpec(num_ranks, 8, 8192, speeds), bimodal(count, num_ranks)
        plan = plan_batch(samples, cluster, cost, planner=LAST_RESORT, sync=sync)  # validates itself
        assert plan.predicted_time_s >= plan.lower_bound_s * (1 - 1e-9)
        assert all(
            group.predicted_time_s
            == pytest.approx(
                cost.pack_time_s([samples[row].num_tokens for row in group.sequences], group.ranks, cluster)
            )
            for group in plan.groups
        )


def test_the_last_resort_gives_a_slow_rank_less():
    slow = ClusterSpec(8, 8, 8192, (1.0,) * 7 + (0.25,))
    plan = plan_batch([*bimodal(400, 1, 1)], slow, ALL_TO_ALL, planner=LAST_RESORT)
    tokens = [sum(plan.samples[row].num_tokens for group in plan.groups if rank in group.ranks
                  for row in group.sequences) for rank in range(8)]
    assert tokens[7] < 0.5 * min(tokens[:7])
