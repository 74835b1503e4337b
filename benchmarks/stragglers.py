"""Throughput with a slow rank, measured: beside what the speed that is left allows.

    python benchmarks/stragglers.py sleeping     4 ranks whose packs sleep for their predicted time, one three times as
                                                 long: the driver's own loop, real actors, real waiting; no core is busy
    python benchmarks/stragglers.py pinned       2 workers of jobs/train.py, a core each; a process that only counts
                                                 takes half of the second core for a while. Wants two idle cores, root

`sleeping`: two runs of the same batch, all ranks of speed 1 and one of speed 1/3; medians of the steps after the first
5, in which the speed is not known yet. A pack starts when all of its ranks are free; a rank sleeps for the pack's
compute at its own speed, waits for the others, and all of them sleep for the communication that is not hidden.

`pinned`: blocks of steps with and without the counting process take turns; a block's first steps, in which the speed is
not known yet, count on neither side. The process counts for 5 of each 10 ms, in the real-time class: among ordinary
processes Linux shares a core by sessions (autogroup), so that what is left for a worker differs from what is left for a
loop of this script. What it leaves of a core is measured before the run, by a loop beside it.

`allowed`: the mean of the ranks' speeds. Both end with 1 where throughput is below 95 % of it.
"""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LEAST = 0.95
UNKNOWN = 5
"""Steps after which the driver knows a rank's speed: it halves what it remembers at each."""
COUNTING = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
while True:
    end = time.perf_counter() + 0.005
    while time.perf_counter() < end:
        pass
    time.sleep(0.005)
"""
"""A process that counts on a core for half of the time, ahead of all others."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sleeping", "pinned"))
    parser.add_argument("--steps", type=int, default=20, help="steps that count, on each side or of each block")
    parser.add_argument("--samples", type=int, default=96, help="samples of a step")
    parser.add_argument("--blocks", type=int, default=3, help="blocks on each side (pinned)")
    arguments = parser.parse_args(argv)
    return (sleeping if arguments.what == "sleeping" else pinned)(arguments)


def verdict(ratio: float, allowed: float) -> int:
    share = ratio / allowed
    print(f"throughput with the slow rank: {ratio:.3f} of that without; allowed: {allowed:.3f}")
    print(f"{'ok  ' if share >= LEAST else 'FAIL'} {share:.3f} of what the speed that is left allows; at least {LEAST}")
    return int(share < LEAST)


class SleepingRank:
    """A rank whose packs take their time and nothing else. Ranks meet in a store that all of them reach."""

    def __init__(self, rank: int, rate: float, num_ranks: int, port: int, cost: Any) -> None:
        from datetime import timedelta

        from torch.distributed import TCPStore

        self.rank, self.rate, self.num_ranks, self.cost = rank, rate, num_ranks, cost
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
        self.plans: dict[str, Any] = {}
        self.asked = 0

    def prefetch(self, packed: bytes, references: list[Any]) -> dict[str, str]:
        from dhp_ray.runtime.rank_slices import unpacked_slice

        plan, _ = unpacked_slice(packed, references)
        self.plans[plan.plan_id] = plan
        return {}

    def mirrored(self) -> list[float]:
        return []

    def status(self) -> Any:
        from dhp_ray.runtime.messages import Status

        self.asked += 1  # what sleeps gets on
        return Status(call="run", mark_id=str(self.asked))

    def run(self, packed: bytes) -> Any:
        from dhp_ray.train.results import StepResult

        step, plan_id, *_ = pickle.loads(packed)
        start = time.perf_counter()
        plan = self.plans.pop(plan_id)
        times = tuple(self._pack(pack, f"{plan_id}/{pack.index}", start) for pack in plan.packs)
        self._meet(f"{plan_id}/update", self.num_ranks)
        return StepResult(step, self.rank, 2.0, 100, 1.0, 1e-4, True, step, time.perf_counter() - start, 0.0, times,
                          {"hits": 0, "creates": 0, "evictions": 0, "overflows": 0}, plan_id=plan_id)

    def _pack(self, pack: Any, name: str, start: float) -> Any:
        from dhp_ray.planner.plan.cluster import ClusterSpec
        from dhp_ray.train.results import PackTime

        degree, begin = len(pack.ranks), time.perf_counter()
        self._meet(f"{name}/begin", degree)
        met = time.perf_counter()
        lengths = [sample.num_tokens for sample in pack.samples]
        work_s = sum(float(self.cost.attention_s(length)) + self.cost.linear_s * length for length in lengths) / degree
        time.sleep(self.rate * work_s + self.cost.pack_s)
        worked = time.perf_counter()
        self._meet(f"{name}/end", degree)
        nominal = ClusterSpec(degree, degree, max(lengths))
        time.sleep(max(0.0, self.cost.pack_time_s(lengths, range(degree), nominal) - work_s - self.cost.pack_s))
        end = time.perf_counter()
        return PackTime(pack.index, begin - start, end - start, met - begin + end - worked)

    def _meet(self, name: str, number: int) -> None:
        """Return once so many ranks have called it."""
        if number == 1:
            return
        if self.store.add(name, 1) == number:
            self.store.set(f"{name}/all", "")
        self.store.wait([f"{name}/all"])


def sleeping(arguments: argparse.Namespace) -> int:
    import ray
    from torch.distributed import TCPStore

    num_ranks, slow_rate = 4, 3.0
    ray.init("local", num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(f"{num_ranks} ranks whose packs sleep, {arguments.samples} samples a step, {arguments.steps} steps; seconds "
          "of a step, median (least to most)")
    medians = []
    for rates in ([1.0] * num_ranks, [1.0] * (num_ranks - 1) + [slow_rate]):
        times = step_times(rates, store.port, arguments)
        medians.append(statistics.median(times))
        print(f"  rates {rates}: {medians[-1]:.3f} ({min(times):.3f} to {max(times):.3f})", flush=True)
    ray.shutdown()
    return verdict(medians[0] / medians[1], (num_ranks - 1 + 1 / slow_rate) / num_ranks)


def step_times(rates: list[float], port: int, arguments: argparse.Namespace) -> list[float]:
    """Seconds between the commits of two steps, once speeds are known."""
    from benchmarks.driver_loop import ready_driver, run_steps
    from dhp_ray.runtime.messages import Message, StepCommitted

    with tempfile.TemporaryDirectory(prefix="dhp_ray_stragglers_") as folder:
        driver, _ = ready_driver(Path(folder), len(rates), arguments.samples, UNKNOWN + arguments.steps + 1,
                                 functools.partial(sleeping_ranks, rates, port))
        assert driver.session is not None
        commits: list[float] = []

        def tell(message: Message) -> None:
            if isinstance(message, StepCommitted):
                commits.append(time.perf_counter())

        run_steps(driver, driver.session, tell)
        driver.session.current.dispatcher.stop()
    return [after - before for before, after in pairwise(commits)][UNKNOWN:]


def sleeping_ranks(rates: list[float], port: int, plan: Any, num_steps: int) -> list[Any]:
    import ray

    from dhp_ray.config import CONF
    from dhp_ray.planner import CostModel

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    methods = {"prefetch": "prefetch", "mirrored": "control", "status": "control"}
    for name, group in methods.items():
        setattr(SleepingRank, name, ray.method(concurrency_group=group)(getattr(SleepingRank, name)))
    options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": {"prefetch": 1, "control": 1}}
    actor, cost = ray.remote(**options)(SleepingRank), CostModel.load(str(CONF / "cost" / "cpu.yaml"))
    actors = [actor.remote(rank, rate, len(rates), port, cost) for rank, rate in enumerate(rates)]
    ray.get([each.status.remote() for each in actors])  # they have begun
    return actors


def pinned(arguments: argparse.Namespace) -> int:
    from benchmarks.worlds import data_overrides
    from tests.integration.faults import Run
    from tests.integration.jobs import lines

    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("wants two cores")
        return 1
    left = left_of_a_core(cores[1])
    print(f"the counting process leaves {left:.2f} of a core", flush=True)
    rates: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="dhp_ray_stragglers_") as folder:
        run = Run(Path(folder) / "run", *data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), Path(folder)),
                  "model=small", "train.min_learning_rate_ratio=1", "checkpoint.every_steps=0",
                  "elastic.mirror_every_steps=0", "elastic.evict_below=0", "cluster.num_workers=2",
                  "cluster.cpus_per_worker=0.5", f"batch.global_samples={arguments.samples}",
                  "planner.tokens_per_rank=4096", "run.steps=100000")
        try:
            run.wait_for_step(UNKNOWN, timeout_s=600)
            for pid, core in zip(run.pids, cores):
                pin(pid, core)
            for block in range(2 * arguments.blocks):
                shared = block % 2 == 1
                with counting(cores[1], shared):
                    first = run.step + UNKNOWN
                    run.wait_for_step(first + arguments.steps, timeout_s=3600)
                steps = lines(run.folder, "metrics.jsonl")[first : first + arguments.steps]
                tokens_per_s = sum(step["num_tokens"] for step in steps) / sum(step["step_time_s"] for step in steps)
                rates[shared].append(tokens_per_s)
                print(f"block {block + 1}, {'beside the counting process' if shared else 'alone'}: "
                      f"{tokens_per_s:.0f} tokens/s", flush=True)
        finally:
            run.end()
    pairs = [slow / calm for calm, slow in zip(rates[False], rates[True])]
    return verdict(statistics.median(pairs), (1 + left) / 2)


def pin(pid: int, core: int) -> None:
    """Keep a process with all of its threads on a core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def count(core: int, seconds: float = 1e9) -> int:
    """Count on a core for so long."""
    os.sched_setaffinity(0, {core})
    number, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        number += 1
    return number


@contextmanager
def counting(core: int, wanted: bool = True) -> Iterator[None]:
    """A process counts on a core. (Not a fork: of a process with threads, it may hang before it counts.)"""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", COUNTING, str(core)])
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the counting process has ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def left_of_a_core(core: int) -> float:
    """The share of a core that a process has beside one that only counts."""
    before = os.sched_getaffinity(0)
    alone = count(core, 2.0)
    with counting(core):
        time.sleep(0.2)
        beside = count(core, 2.0)
    os.sched_setaffinity(0, before)
    return beside / alone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
