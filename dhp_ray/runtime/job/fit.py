"""Training from Python: what `jobs/train.py` does, in a script, a notebook, or a trial of Ray Tune.

In a trial of Ray Tune:

    reservation   the trial's own, made of `resources`: a bundle of the trial's process, then one per worker
    run.dir       the trial's folder, below the given one, which all nodes must reach
    report        the metrics of every committed step; with a checkpoint if a new one is whole
    checkpoint    a file that names the run's folder and the step: tensors stay where the run has written them
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import chdir, nullcontext
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.train import Checkpoint, Result

from dhp_ray.config import Config, ConfigError, in_upload, load, make_absolute, refuse_relative_run
from dhp_ray.run_folder import CHECKPOINTS_FOLDER, LEDGER_FILE, METRICS_FILE, checkpoint_folder
from dhp_ray.runtime.job.console import Console
from dhp_ray.runtime.job.head import connect, disconnect
from dhp_ray.runtime.job.job import bundle_of, run
from dhp_ray.runtime.job.preflight import check_here, device_of
from dhp_ray.runtime.job.signals import ShutdownSignals
from dhp_ray.runtime.messages import Message, Notice, RunError, StepCommitted
from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.runtime.records.lease import EXPIRES_S, take_lease
from dhp_ray.runtime.waits import Waits
from dhp_ray.spooled_log import last_line
from dhp_ray.storage import Folder

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory
    from ray.util.placement_group import PlacementGroup


Overrides = Sequence[str] | Mapping[str, Any]
"""`key=value` words as on the command line, or values by key: also paths, and numpy's scalars."""


def fit(overrides: Overrides = ()) -> Result:
    """Train to the end, on the cluster that this process has joined, or would join.

    Inside a trial of Ray Tune every committed step is reported, and the run goes on from Tune's checkpoint.

    Returns `metrics` of the last committed step (its line in metrics.jsonl, also of an earlier start), `checkpoint` and
    `path`: the run's folder (the former opens it, also where its URI has credentials, which nothing shows), and
    `error`, a RunError of one line if the run has ended early; in a trial it is raised. ConfigError: a key or value in
    `overrides` is not allowed.
    """
    name = current_trial()
    with chdir(callers_folder(name)):
        config = config_of(overrides)
        if not name:
            check_here(config, ray.is_initialized())
        in_copy = ray.is_initialized() and ray.get_runtime_context().runtime_env.get("working_dir")
        if in_upload(Path.cwd()) or in_copy:  # what this process starts on Ray runs in copies of a working directory
            refuse_relative_run(config)
        else:
            make_absolute(config)
    trial = Trial(name, config) if name else None
    shown = Shown(trial)
    waits, joined = Waits(shown.show), not ray.is_initialized()
    lease = None
    error = ""
    try:
        # Ray Tune may start a trial again while the process that it has paused is still ending
        lease = take_lease(config.run.dir, lambda text: shown.show(Notice(text)), EXPIRES_S if trial else 0.0)
        if joined:
            with waits.on("the Ray cluster"):
                connect()
        if trial:
            trial.resume()
        error = run(config, lease, shown, waits, ShutdownSignals(), trial.room if trial else None, leaves=False).error
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
    folder = Folder(config.run.dir)
    files, path = folder.place()
    metrics = shown.metrics or ({} if error else last_metrics(folder))
    return Result(metrics=metrics, checkpoint=Checkpoint(path, files), path=config.run.dir,
                  error=RunError(error) if error else None)


def last_metrics(folder: Folder) -> dict[str, Any]:
    """Return the metrics of a run's last committed step; none if there is no such step."""
    line = last_line(folder, METRICS_FILE)
    return json.loads(line) if line else {}


def resources(overrides: Overrides = ()) -> PlacementGroupFactory:
    """Return what a Ray Tune trial that calls `fit` with these overrides reserves, for `tune.with_resources`. Call it
    in a process that has joined Ray. ConfigError: as `fit`.
    """
    from ray.tune import PlacementGroupFactory

    return PlacementGroupFactory(bundles_of(config_of(overrides)), strategy="PACK")


def config_of(overrides: Overrides) -> Config:
    """Return the configuration that `jobs/train.py` would have."""
    if isinstance(overrides, Mapping):
        return load([f"{key}={word_of(key, value)}" for key, value in overrides.items()])
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(f"overrides: got {overrides!r}; allowed: a list of key=value words, or values by key")
    return load(list(overrides))


def word_of(key: str, value: Any) -> str:
    """Return how the command line says a value."""
    try:
        found = plain(value)
    except TypeError:
        raise ConfigError(f"{key}: got {value!r}; allowed: a string, number, bool, path, or a list or mapping of "
                          "these") from None
    return found if isinstance(found, str) else json.dumps(found)


def plain(value: Any) -> Any:
    """Return the value as JSON has it. TypeError: JSON has none, or null, which no key takes."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if not isinstance(value, str | int | float):
        raise TypeError
    return value


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


POINTER_FILE = "dhp_ray.json"
ORIGINAL_FOLDER = "TUNE_ORIG_WORKING_DIR"  # in which Ray Tune keeps the folder that a trial's process began in
TRIAL_CPUS = 0.01  # CPUs of a trial's own process, which waits for its driver most of the time


def bundles_of(config: Config) -> list[dict[str, float]]:
    """Return what a trial with this configuration reserves, on the cluster that this process has joined."""
    accelerator = device_of(config.cluster.device, ray.cluster_resources())
    return [{"CPU": TRIAL_CPUS}, *[bundle_of(config, accelerator)] * config.cluster.num_workers]


def current_trial() -> str:
    """Return the id of the Ray Tune trial that this process runs; empty if it runs none."""
    if "ray.tune" not in sys.modules:  # importing it takes seconds
        return ""
    from ray import tune

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`get_trial_id` is meant")  # outside a trial it is None
        return tune.get_context().get_trial_id() or ""


def callers_folder(trial: str) -> Path:
    """Return the folder of relative paths: this process's; a trial's first one, as Ray Tune has left it."""
    return Path(os.environ.get(ORIGINAL_FOLDER, ".") if trial else ".")


class Trial:
    """The trial `name` and its run with `config`, whose `run.dir` becomes the trial's folder."""

    def __init__(self, name: str, config: Config) -> None:
        self.config, self._sweep = config, Folder(config.run.dir)
        config.run.dir = self._sweep.child(name).uri
        self.run = Folder(config.run.dir)
        if config.cluster.max_workers > config.cluster.num_workers:
            raise ConfigError(f"cluster.max_workers: got {config.cluster.max_workers} in a trial of Ray Tune, whose "
                              "reservation cannot grow; allowed: 0")
        self._checkpoints = Checkpoints(self.run, config.checkpoint.keep)
        self._reported = self._checkpoints.newest_step()

    @property
    def room(self) -> PlacementGroup:
        """The trial's reservation, which must match the configuration."""
        room, wanted = ray.util.get_current_placement_group(), bundles_of(self.config)
        if room is None or room.bundle_specs != wanted:
            raise ConfigError(f"the trial reserves {room.bundle_specs if room else 'no bundles'}; allowed, for "
                              f"cluster.num_workers={self.config.cluster.num_workers}: tune.with_resources(trial, "
                              "dhp_ray.resources(...)) with the same overrides")
        return room

    def resume(self) -> None:
        """Take over the run that Ray Tune's checkpoint names, if it is another trial's."""
        from ray import tune

        checkpoint = tune.get_checkpoint()
        if checkpoint is None:
            return
        with checkpoint.as_directory() as folder:
            pointer = json.loads((Path(folder) / POINTER_FILE).read_text(encoding="utf-8"))
        # another trial's folder is beside this one's; the pointer shows no credentials
        source = self._sweep.child(PurePosixPath(pointer["run.dir"].partition("?")[0]).name)
        if source.uri != pointer["run.dir"]:
            source = Folder(pointer["run.dir"])
        if source.uri != self.run.uri:
            copy_run(source, self.run, pointer["step"])
            self._reported = pointer["step"]

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Report a committed step to Ray Tune. Does not return if the trial is to stop or to pause."""
        from ray import tune

        newest = self._checkpoints.newest_step()
        if newest <= self._reported:
            tune.report(dict(metrics))
            return
        self._reported = newest
        with tempfile.TemporaryDirectory() as folder:
            pointer = {"run.dir": self.run.uri, "step": newest}
            (Path(folder) / POINTER_FILE).write_text(json.dumps(pointer), encoding="utf-8")
            tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(folder))


def copy_run(source: Folder, target: Folder, step: int) -> None:
    """Make `target` a run that has gone as far as the checkpoint of `step` of `source`, another run."""
    if step not in Checkpoints(source, 1).complete():
        raise RunError(f"{source.uri} has no checkpoint of step {step} any more; allowed: a larger checkpoint.keep")
    target.delete(CHECKPOINTS_FOLDER)
    with tempfile.TemporaryDirectory() as scratch:
        for name in (METRICS_FILE, LEDGER_FILE, checkpoint_folder(step)):
            local = Path(scratch) / Path(name).name
            source.download(name, local)
            target.upload(local, name)
