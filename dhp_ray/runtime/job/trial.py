"""A run inside a Ray Tune trial: its room, its folder, what it reports, and what it goes on from.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import ray

from dhp_ray.config import Config, ConfigError
from dhp_ray.run_folder import CHECKPOINTS_FOLDER, LEDGER_FILE, METRICS_FILE, checkpoint_folder
from dhp_ray.runtime.job.preflight import device_of
from dhp_ray.runtime.job.roster import bundle_of
from dhp_ray.runtime.messages import RunError
from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.storage import Folder

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory
    from ray.util.placement_group import PlacementGroup

POINTER_FILE = "dhp_ray.json"
ORIGINAL_FOLDER = "TUNE_ORIG_WORKING_DIR"
"""The variable in which Ray Tune keeps the folder that a trial's process began in."""

TRIAL_CPUS = 0.01
"""CPUs of a trial's own process, which waits for its driver most of the time."""


def bundles_of(config: Config) -> list[dict[str, float]]:
    """Return what a trial with this configuration reserves, on the cluster that this process has joined."""
    accelerator = device_of(config.cluster.device, ray.cluster_resources())
    return [{"CPU": TRIAL_CPUS}, *[bundle_of(config, accelerator)] * config.cluster.num_workers]


def factory_of(config: Config) -> PlacementGroupFactory:
    """Return `bundles_of` in the form that Ray Tune takes."""
    from ray.tune import PlacementGroupFactory

    return PlacementGroupFactory(bundles_of(config), strategy="PACK")


def current_trial() -> str:
    """Return the id of the Ray Tune trial that this process runs; empty if it runs none."""
    if "ray.tune" not in sys.modules:  # importing it takes seconds
        return ""
    from ray import tune

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`get_trial_id` is meant")  # outside a trial it is None
        return tune.get_context().get_trial_id() or ""


def callers_folder(trial: str) -> Path:
    """Return the folder that relative paths are taken from: this process's own. In a trial it is the one that its
    process began in; Ray Tune has changed to the trial's folder, which is deleted.
    """
    return Path(os.environ.get(ORIGINAL_FOLDER, ".") if trial else ".")


@dataclass
class Trial:
    """The trial `name` and its run with `config`, whose `run.dir` becomes the trial's folder.

    Raises:
        ConfigError: the run may grow, and a trial's reservation cannot.
    """

    name: str
    config: Config

    def __post_init__(self) -> None:
        self._sweep = Folder(self.config.run.dir)
        self.config.run.dir = self._sweep.child(self.name).uri
        self.run = Folder(self.config.run.dir)
        if self.config.cluster.max_workers > self.config.cluster.num_workers:
            raise ConfigError(f"cluster.max_workers: got {self.config.cluster.max_workers} in a trial of Ray Tune, "
                              "whose reservation cannot grow; allowed: 0")
        self._checkpoints = Checkpoints(self.run, self.config.checkpoint.keep)
        self._reported = self._checkpoints.newest_step()

    @property
    def room(self) -> PlacementGroup:
        """The trial's reservation.

        Raises:
            ConfigError: it does not match the configuration.
        """
        room, wanted = ray.util.get_current_placement_group(), bundles_of(self.config)
        if room is None or room.bundle_specs != wanted:
            raise ConfigError(
                f"the trial reserves {room.bundle_specs if room else 'no bundles'}; allowed, for "
                f"cluster.num_workers={self.config.cluster.num_workers}: tune.with_resources(trial, "
                "dhp_ray.resources(...)) with the same overrides"
            )
        return room

    def resume(self) -> None:
        """Take over the run that Ray Tune's checkpoint names, if it is another trial's.

        Raises:
            RunError: that run no longer has the checkpoint.
        """
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
    """Make `target` a run that has gone as far as the checkpoint of `step` of `source`, another run.

    Raises:
        RunError: `source` has no such checkpoint.
    """
    if step not in Checkpoints(source, 1).complete():
        raise RunError(f"{source.uri} has no checkpoint of step {step} any more; allowed: a larger checkpoint.keep")
    target.delete(CHECKPOINTS_FOLDER)
    with tempfile.TemporaryDirectory() as scratch:
        for name in (METRICS_FILE, LEDGER_FILE, checkpoint_folder(step)):
            local = Path(scratch) / Path(name).name
            source.download(name, local)
            target.upload(local, name)
