"""Loss series of `jobs/train.py` whose images are encoded apart from their packs, beside a run of one worker whose
packs encode their own: the whole way from files to metrics, where `cases.py` has plans and ranks alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import ray

from benchmarks.cases import LOSS_TOLERANCE, SYNCS
from tests.integration.jobs import losses, train

NUM_WORKERS, NUM_STEPS, PATIENCE_S = 3, 10, 900.0
SETTINGS = ("data.max_pixels=40000", "planner.max_sequence_tokens=768", "planner.tokens_per_rank=768",
            "train.adam_eps=1e-6", "train.learning_rate=1e-3", "batch.global_samples=6", "cluster.cpus_per_worker=0.2",
            "checkpoint.every_steps=0", f"run.steps={NUM_STEPS}", "seed=3")
LINES = {sync: f"{NUM_WORKERS} workers, {sync}, images apart, jobs/train.py" for sync in SYNCS}


@dataclass(frozen=True)
class Series:
    """What a run came to: the largest difference of a step's loss, relative, and how many of its plans have images
    apart, so that what is wrong is in `faults`.
    """

    sync: str
    loss_error: float
    num_apart: int
    seconds: float

    @property
    def faults(self) -> tuple[str, ...]:
        found = [] if self.loss_error <= LOSS_TOLERANCE else [f"loss differs by {self.loss_error:.1e}"]
        return tuple(found + ["no plan with images apart"] * (self.num_apart == 0))

    def __str__(self) -> str:
        return (f"{LINES[self.sync]}: loss {self.loss_error:.1e}, {self.num_apart} of {NUM_STEPS} plans with images "
                f"apart, {self.seconds:.1f} s" + "".join(f"  FAILED: {fault}" for fault in self.faults))


def series_on_a_cluster(overrides: Sequence[str], folder: Path, syncs: Sequence[str]) -> Iterator[Series]:
    """`job_series` on a Ray cluster of this machine's own."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init("local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        yield from job_series(overrides, folder, syncs)
    finally:
        del os.environ["RAY_ADDRESS"]
        ray.shutdown()


def job_series(overrides: Sequence[str], folder: Path, syncs: Sequence[str]) -> Iterator[Series]:
    """Of runs in folders below `folder`, on the cluster that RAY_ADDRESS names."""
    common = [*overrides, *SETTINGS]
    alone = folder / "alone"
    train(alone, *common, "cluster.num_workers=1", "planner.name=static", "planner.encoder=group",
          timeout_s=PATIENCE_S)
    for sync in syncs:
        begin, run = perf_counter(), folder / sync
        train(run, *common, f"cluster.num_workers={NUM_WORKERS}", f"planner.sync={sync}", "planner.encoder=world",
              "planner.tokens_per_rank=256", timeout_s=PATIENCE_S)
        errors = [abs(found - wanted) / abs(wanted) for found, wanted in zip(losses(run), losses(alone), strict=True)]
        assert len(errors) == NUM_STEPS
        yield Series(sync, max(errors), _num_apart(run), perf_counter() - begin)


def _num_apart(run: Path) -> int:
    plans = [json.loads(path.read_text()) for path in (run / "plans").glob("step_*.json")]
    return sum(plan["vision"]["layout"] == "world" for plan in plans)
