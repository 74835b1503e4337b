"""Training from Python: what `jobs/train.py` does, in a script, a notebook, or a trial of Ray Tune."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.train import Checkpoint, Result

from dhp_ray.config import Config, load
from dhp_ray.constraints import in_upload, make_absolute, refuse_relative_run
from dhp_ray.runtime.job.console import Console
from dhp_ray.runtime.job.ending import Ending
from dhp_ray.runtime.job.head import connect, disconnect
from dhp_ray.runtime.job.job import run
from dhp_ray.runtime.job.preflight import check_here
from dhp_ray.runtime.job.trial import Trial, callers_folder, current_trial, factory_of
from dhp_ray.runtime.messages import Message, Notice, RunError, StepCommitted
from dhp_ray.runtime.records.lease import EXPIRES_S, take_lease
from dhp_ray.runtime.waits import Waits
from dhp_ray.storage import Folder

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory

Overrides = Sequence[str] | Mapping[str, Any]
"""`key=value` words as on the command line, or values by key."""


def fit(overrides: Overrides = ()) -> Result:
    """Train to the end, on the cluster that this process has joined, or would join.

    Inside a trial of Ray Tune every committed step is reported, and the run goes on from Tune's checkpoint.

    Returns:
        `metrics` of the last committed step (its line in metrics.jsonl), `checkpoint` and `path`: the run's folder
        (the former opens it, also where its URI has credentials, which nothing shows), and `error`, a RunError of one
        line if the run has ended early.

    Raises:
        ConfigError: a key or value in `overrides` is not allowed; one line.
        RunError: only in a trial, which has failed then: why the run has ended early.
    """
    trial = None
    name = current_trial()
    with chdir(callers_folder(name)):
        config = config_of(overrides)
        if not name:
            check_here(config)
        if in_upload(Path.cwd()) or runs_in_a_copy():
            refuse_relative_run(config)
        else:
            make_absolute(config)
    if name:
        trial = Trial(name, config)
    shown = Shown(trial)
    waits = Waits(shown.show)
    lease = None
    joined = not ray.is_initialized()
    error = ""
    try:
        # Ray Tune may start a trial again while the process that it has paused is still ending
        lease = take_lease(config.run.dir, lambda text: shown.show(Notice(text)), EXPIRES_S if trial else 0.0)
        if joined:
            with waits.on("the Ray cluster"):
                connect()
        if trial:
            trial.resume()
        error = run(config, lease, shown, waits, Ending(), trial.room if trial else None, leaves=False).error
    except RunError as failure:
        error = str(failure)
    finally:
        with lease or nullcontext():  # released last, and also if this is interrupted
            shown.close()
            waits.close()
            if joined:
                disconnect()
    if error and trial:
        raise RunError(error)
    files, path = Folder(config.run.dir).place()
    return Result(metrics=shown.metrics, checkpoint=Checkpoint(path, files), path=config.run.dir,
                  error=RunError(error) if error else None)


def resources(overrides: Overrides = ()) -> PlacementGroupFactory:
    """Return what a Ray Tune trial that calls `fit` with these overrides reserves, for `tune.with_resources`. Call it
    in a process that has joined Ray.

    Raises:
        ConfigError: a key or value in `overrides` is not allowed; one line.
    """
    return factory_of(config_of(overrides))


def runs_in_a_copy() -> bool:
    """Whether what this process starts on Ray runs in copies of a working directory."""
    return ray.is_initialized() and bool(ray.get_runtime_context().runtime_env.get("working_dir"))


def config_of(overrides: Overrides) -> Config:
    """Return the configuration that `jobs/train.py` would have.

    Raises:
        ConfigError: a key or value is not allowed; one line.
    """
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={value if isinstance(value, str) else json.dumps(value)}"
                     for key, value in overrides.items()]
    return load(list(overrides))


class Shown(Console):
    """The console of a run, which keeps the metrics of the last step and reports them if there is a trial."""

    def __init__(self, trial: Trial | None) -> None:
        super().__init__(sys.stdout)
        self.trial = trial
        self.metrics: dict[str, Any] = {}

    def show(self, message: Message) -> None:
        super().show(message)
        if isinstance(message, StepCommitted):
            self.metrics = message.metrics
            if self.trial:
                self.trial.report(message.metrics)
