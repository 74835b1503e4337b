"""Planning that is slowed at random: which plans run, what they cost beside `dhp`'s, and whether files and ranks agree.

    python benchmarks/late_plans.py                200 steps of a run of 2 workers, preset tiny, then the same
                                                   modelled at 64 and 512 ranks
    python benchmarks/late_plans.py --steps 12     a shorter run; --steps 0: modelled alone

Live, the planner of the driver waits before it plans, by a seeded draw: half of the times not at all, else up to twice
the median step. Every plan file is held against the plan ids that the ranks report, the ledger against the files.
Modelled, the same policy (`planning.patience_s`) decides with predicted seconds as measured ones, without Ray. Ratios
are predicted makespans over `dhp`'s of the same batch, late plans included.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.planner import bimodal  # noqa: E402
from dhp_ray.planner import LAST_RESORT, PLANNERS, ClusterSpec, CostModel, Sample, plan_batch  # noqa: E402
from dhp_ray.runtime.driver.actor import DriverActor  # noqa: E402
from dhp_ray.runtime.driver.driver import Driver  # noqa: E402
from dhp_ray.runtime.driver.feedback import patience_s  # noqa: E402

MODELLED = ((64, 512), (512, 2048))
"""Ranks and sequences."""

COST = CostModel(quadratic_s=5.128e-9, linear_s=1.839576e-4, comm_bytes_per_token=2097152, fixed_s=0.63,
                 bandwidth_bytes_per_s={2: 1.25e11, 4: 1.09e11, 8: 1.01e11, 16: 1.08e10, 32: 6.2e9, 64: 5.1e9})


def delay_s(draw: random.Random, step_s: float) -> float:
    return draw.uniform(0.0, 2.0 * step_s) if draw.random() < 0.5 else 0.0


class SlowDriver(Driver):
    """A driver whose `dhp` waits at random, and which writes down the plan ids that the ranks report."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        from dhp_ray.runtime.driver.commit import Commits
        from dhp_ray.runtime.driver.dispatch import FinishedStep

        planned, commit, draw = PLANNERS["dhp"], Commits.commit, random.Random(0)
        reported = Path(self.config.run.dir) / "reported.jsonl"

        def slow(problem: Any) -> Any:
            step_s = (
                statistics.median(self.session.history.step_times_s)
                if self.session and self.session.history.step_times_s
                else 0.0
            )
            time.sleep(delay_s(draw, step_s))
            return planned(problem)

        def noted(commits: Commits, done: FinishedStep) -> None:
            with reported.open("a") as file:
                file.write(json.dumps([done.step, [result.plan_id for result in done.results]]) + "\n")
            commit(commits, done)

        PLANNERS["dhp"], Commits.commit = slow, noted  # type: ignore[method-assign]


class SlowActor(DriverActor):
    def __init__(self, *arguments: Any) -> None:
        self.driver = SlowDriver(*arguments)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of the live run; 0: none")
    parser.add_argument("--modelled", type=int, default=200, help="modelled steps of each cluster")
    arguments = parser.parse_args(argv)
    print("| | late | makespan over dhp's, mean | worst |\n|---|---|---|---|", flush=True)
    if arguments.steps:
        with tempfile.TemporaryDirectory(prefix="dhp_ray_late_") as folder:
            live(Path(folder), arguments.steps)
    for num_ranks, count in MODELLED:
        modelled(num_ranks, count, arguments.modelled)
    return 0


def live(folder: Path, steps: int) -> None:
    import ray

    import dhp_ray.runtime.driver.actor as actor_module
    from benchmarks.worlds import data_overrides
    from dhp_ray.config import load
    from dhp_ray.planner.plan.types import Plan
    from dhp_ray.runtime.job.job import train
    from dhp_ray.runtime.job.signals import ShutdownSignals
    from dhp_ray.runtime.records.lease import take_lease

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor_module.DriverActor = SlowActor  # type: ignore[misc]
    run_dir = folder / "run"
    config = load([*data_overrides("", folder, 96), "model=tiny", "batch.global_samples=7", "cluster.num_workers=2",
                   "cluster.cpus_per_worker=0.5",
                   "checkpoint.every_steps=0", f"run.steps={steps}", f"run.dir={run_dir}"])
    with take_lease(config.run.dir, print) as lease:
        failed = train(config, lease, ShutdownSignals())
    if failed:
        raise SystemExit("the run failed")
    files = [json.loads((run_dir / "plans" / f"step_{step:06d}.json").read_text()) for step in range(1, steps + 1)]
    reported = dict(json.loads(line) for line in (run_dir / "reported.jsonl").read_text().splitlines())
    ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    differ = [step for step, file in enumerate(files, 1) if set(reported[step]) != {file["id"]}]
    inexact = [line["step"] for line, file in zip(ledger, files, strict=True)
               if sorted(line["sample_ids"]) != sorted(sample["id"] for sample in file["inputs"]["samples"])]
    plans = [Plan.from_json(file) for file in files]
    ratios = []
    for plan in plans:
        cost = CostModel.from_json(plan.inputs["cost"])
        exact = plan_batch(plan.samples, plan.cluster, cost, sync=plan.sync)
        ratios.append(plan.predicted_time_s / exact.predicted_time_s)
    row(
        f"{steps} live steps, 2 ranks; plan files that differ from what ran: {len(differ)}, ledger lines that are not "
        f"exact: {len(inexact)}",
        [file["late"] for file in files],
        ratios,
    )


def modelled(num_ranks: int, count: int, steps: int) -> None:
    """Plans of random batches; a delay as in the live run, of which a whole step hides what it can."""
    draw, ratios, late, over_bound = random.Random(0), [], [], [1.0]
    cluster = ClusterSpec(num_ranks, 8, 8192)
    for step in range(steps):
        samples = [Sample(str(row), int(length)) for row, length in enumerate(bimodal(count, num_ranks, step))]
        plan, last_resort = (plan_batch(samples, cluster, COST, planner=planner) for planner in ("dhp", LAST_RESORT))
        left_s = delay_s(draw, plan.predicted_time_s) - plan.predicted_time_s  # once the step before is over
        limit_s = patience_s(last_resort.predicted_time_s, plan.lower_bound_s * statistics.median(over_bound), 1.0)
        late.append(left_s > limit_s)
        over_bound.append(plan.predicted_time_s / plan.lower_bound_s)
        ratios.append(last_resort.predicted_time_s / plan.predicted_time_s if late[-1] else 1.0)
    row(f"{steps} modelled steps, {num_ranks} ranks, {count} sequences", late, ratios)


def row(name: str, late: Sequence[bool], ratios: Sequence[float]) -> None:
    print(f"| {name} | {100 * sum(late) / len(late):.0f} % | {statistics.mean(ratios):.4f} | {max(ratios):.4f} |",
          flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
