"""Training from Python: `dhp_ray.fit` where Ray is joined, where it is not, and in trials of Ray Tune."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

import dhp_ray
from dhp_ray.config import ConfigError
from dhp_ray.runtime.job.fit import copy_run
from dhp_ray.runtime.messages import RunError
from dhp_ray.storage import Folder
from tests.integration.jobs import ROOT, losses, run, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
RATES = (1e-3, 3e-3, 1e-4, 1e-5)


def test_losses_are_the_jobs_bit_for_bit(common: list[str], tmp_path: Path) -> None:
    settings = [*common, "cluster.num_workers=1", "planner.tokens_per_rank=512", "run.steps=6"]  # one plan there is
    train(tmp_path / "job", *settings)
    result = dhp_ray.fit([*settings, f"run.dir={tmp_path / 'here'}"])
    assert result.error is None
    assert ray.is_initialized()
    assert losses(tmp_path / "here") == losses(tmp_path / "job")
    assert result.metrics is not None
    assert (result.metrics["step"], result.metrics["loss"]) == (6, losses(tmp_path / "job")[-1])
    again = dhp_ray.fit([*settings, f"run.dir={tmp_path / 'here'}"])  # which is finished
    assert again.metrics is not None
    assert (again.metrics["step"], again.metrics["loss"]) == (6, losses(tmp_path / "job")[-1])
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path) == Path(result.path) == tmp_path / "here"
    program = "import dhp_ray, ray, sys; found = dhp_ray.fit(sys.argv[1:]); print(found.error, ray.is_initialized())"
    done = subprocess.run([sys.executable, "-c", program, *settings, f"run.dir={tmp_path / 'script'}"], cwd=ROOT,
                          env=dict(os.environ), capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "None False"), done.stderr
    assert losses(tmp_path / "script") == losses(tmp_path / "job")


def test_a_run_that_this_machine_has_no_room_for_trains_on_the_cluster_that_is_joined(
    common: list[str], tmp_path: Path
) -> None:
    """Which nothing but the process itself knows of."""
    cpus = (os.cpu_count() or 1) + 1
    program = (f"import dhp_ray, ray, sys; ray.init('local', num_cpus={cpus}); found = dhp_ray.fit(sys.argv[1:]); "
               "print(found.error, found.metrics['step'])")
    done = subprocess.run([sys.executable, "-c", program, *common, "run.steps=1", "cluster.num_workers=1",
                           f"cluster.cpus_per_worker={cpus}", f"run.dir={tmp_path / 'run'}"],
                          cwd=ROOT, env=os.environ | {"RAY_ADDRESS": ""}, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["None 1"]), done.stderr


def test_errors_are_one_line(common: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^run.stepz: no such key"):
        dhp_ray.fit({"run.stepz": 3})
    settings = [*common, f"run.dir={tmp_path / 'run'}", "run.steps=2", "cluster.num_workers=1"]
    result = dhp_ray.fit([*settings, "cluster.cpus_per_worker=64", "cluster.start_timeout_s=0.5"])
    assert isinstance(result.error, RunError)
    assert str(result.error).startswith("cluster.num_workers=1: needs 64 CPU; ")
    assert "\n" not in str(result.error)
    assert result.metrics == {}


FIT = """
import os, sys, dhp_ray, ray
if len(sys.argv) > 2 and sys.argv[1].startswith("copy="):
    ray.init(os.environ["RAY_ADDRESS"], runtime_env={"working_dir": sys.argv.pop(1)[5:]})
found = dhp_ray.fit(sys.argv[1:])
with found.checkpoint.as_directory() as folder:
    print(found.error, found.path, sorted(os.listdir(folder)), found)
"""


def fitted(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`dhp_ray.fit` of a script in a folder of its own."""
    return subprocess.run([sys.executable, "-c", FIT, *words], cwd=folder, capture_output=True, text=True, timeout=240,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)


def test_relative_folders_are_the_callers(common: list[str], tmp_path: Path) -> None:
    """On a cluster whose processes run in another folder."""
    settings = [*common, "cluster.num_workers=1", "run.steps=1", "run.dir=runs/mine"]
    done = fitted(tmp_path, *settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"None {tmp_path / 'runs' / 'mine'} [")
    assert len(losses(tmp_path / "runs" / "mine")) == 1
    copied = tmp_path / "copied"
    copied.mkdir()
    refused = fitted(tmp_path, f"copy={copied}", *settings)
    assert "ConfigError: run.dir: got 'runs/mine', which is relative: it would lie in the copy" in refused.stderr


def test_a_checkpoint_behind_credentials_opens(common: list[str], object_store: str, tmp_path: Path) -> None:
    uri = f"s3://KEY:s3cret@bucket/{tmp_path.name}/fitted{object_store}"
    done = fitted(tmp_path, *common, "cluster.num_workers=1", "run.steps=1", f"run.dir={uri}")
    assert done.returncode == 0, done.stderr
    assert "'config.yaml'" in done.stdout.splitlines()[-1]
    assert "s3cret" not in done.stdout + done.stderr


class PauseOnce(FIFOScheduler):
    """Pauses a trial after its third step, once."""

    paused = False

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if self.paused or result["step"] < 3:
            return self.CONTINUE
        self.paused = True
        return self.PAUSE


def all_is_free(seconds: float = 20.0) -> bool:
    """Whether the cluster's CPUs become free."""
    deadline = time.monotonic() + seconds
    while ray.available_resources().get("CPU", 0.0) < 2.0 and time.monotonic() < deadline:
        time.sleep(0.2)
    return ray.available_resources().get("CPU", 0.0) == 2.0


def sweep(words: list[str], folder: Path, rates: tuple[float, ...], scheduler: Any) -> Any:
    def trial(settings: dict[str, Any]) -> None:
        dhp_ray.fit([*words, f"run.dir={folder}", f"train.learning_rate={settings['rate']}"])

    tuner = tune.Tuner(
        tune.with_resources(trial, dhp_ray.resources(words)), param_space={"rate": tune.grid_search(list(rates))},
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler),
        run_config=tune.RunConfig(storage_path=str(folder.parent / "tune"), name="sweep", verbose=0))
    return tuner.fit()


@pytest.mark.timeout(600)
def test_a_sweep_stops_trials_and_shares_the_cluster(common: list[str], tmp_path: Path) -> None:
    words = [*common, "cluster.num_workers=2", "cluster.cpus_per_worker=0.45", "run.steps=6"]
    results = sweep(words, tmp_path / "runs", RATES, ASHAScheduler(max_t=6, grace_period=2, reduction_factor=2))
    assert not results.errors
    steps = Counter(result.metrics["step"] for result in results)
    assert len(results) == 4
    assert 6 in steps
    assert min(steps) < 6, "no trial was stopped"
    assert all_is_free()
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 4
    assert all(list((folder / "tensorboard").glob("events.*")) for folder in folders)
    for result in results:
        own = tmp_path / "runs" / result.metrics["trial_id"]
        assert losses(own)[result.metrics["step"] - 1] == result.metrics["loss"]


@pytest.mark.timeout(600)
def test_a_paused_trial_goes_on_where_it_was(common: list[str], tmp_path: Path) -> None:
    words = [*common, "cluster.num_workers=2", "cluster.cpus_per_worker=0.45", "run.steps=6",
             "checkpoint.every_steps=2"]
    train(tmp_path / "calm", *words, f"train.learning_rate={RATES[0]}")
    scheduler = PauseOnce()
    results = sweep(words, tmp_path / "runs", RATES[:1], scheduler)
    assert not results.errors
    assert scheduler.paused
    [folder] = (tmp_path / "runs").iterdir()
    assert losses(folder) == pytest.approx(losses(tmp_path / "calm"), rel=1e-5)
    assert results[0].metrics["step"] == 6
    assert all_is_free()


def test_a_trial_that_reserves_something_else_is_told_so(common: list[str], tmp_path: Path) -> None:
    words = [*common, "cluster.num_workers=2", "cluster.cpus_per_worker=0.45", f"run.dir={tmp_path / 'run'}"]
    tuner = tune.Tuner(tune.with_resources(lambda settings: dhp_ray.fit(words), {"CPU": 1}),
                       run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0))
    [error] = tuner.fit().errors
    assert "tune.with_resources(trial, dhp_ray.resources(...)) with the same overrides" in str(error)
    assert all_is_free()


def test_a_run_goes_on_from_anothers_checkpoint(common: list[str], tmp_path: Path) -> None:
    """As population-based training does."""
    settings = [*common, "cluster.num_workers=2", "run.steps=4", "checkpoint.every_steps=2"]
    train(tmp_path / "first", *settings)
    train(tmp_path / "second", *settings, "train.learning_rate=1e-5")
    copy_run(Folder(str(tmp_path / "first")), Folder(str(tmp_path / "second")), 2)
    ended = run("train.py", f"run.dir={tmp_path / 'second'}", *settings)
    assert ended.status == 0
    assert losses(tmp_path / "second") == pytest.approx(losses(tmp_path / "first"), rel=1e-5)
    assert "resuming after step 2" in ended.output
    with pytest.raises(RunError, match="has no checkpoint of step 1 any more"):
        copy_run(Folder(str(tmp_path / "first")), Folder(str(tmp_path / "second")), 1)
