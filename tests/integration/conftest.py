"""The first steps of the embedded default. Runs that something happens to: what they are started with, and the run that
nothing happened to beside them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak import SETTINGS
from benchmarks.worlds import data_overrides
from dhp_ray.config import PREPARE_DATA, load
from dhp_ray.data.synthetic import write
from tests.integration.faults import COMPARED, Run, Start
from tests.integration.jobs import FIRST_STEPS, FirstRun, losses, run, train


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set that `make train` writes."""
    path = tmp_path_factory.mktemp("synthetic") / "samples.parquet"
    ended = run("prepare_data.py", f"data.path={path}")
    assert ended.status == 0, ended.errors
    return path


@pytest.fixture(scope="session")
def first_run(ray_cluster: None, synthetic: Path, tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    """The first steps of the default run on two workers, which evaluates six samples of another seed."""
    held_out, folder = synthetic.with_name("held_out.parquet"), tmp_path_factory.mktemp("first") / "run"
    write(held_out, load([f"data.path={held_out}", "data.synthetic.num_samples=6"], PREPARE_DATA).data, seed=1)
    arguments = [f"data.path={synthetic}", f"run.steps={FIRST_STEPS}", f"watch.every_steps={FIRST_STEPS}",
                 "planner.sync=auto", "train.activation_checkpointing=auto", "cluster.num_workers=2",
                 "planner.tokens_per_rank=960", f"eval.path={held_out}", "eval.every_steps=3",
                 f"checkpoint.every_steps={FIRST_STEPS - 1}", "checkpoint.keep=2"]
    return FirstRun(folder, train(folder, *arguments), arguments, held_out)


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*data_overrides(os.environ.get("DHP_RAY_TEST_DATA", ""), tmp_path_factory.mktemp("data")), *SETTINGS,
            "cluster.cpus_per_worker=0.2"]


@pytest.fixture(scope="session")
def nlvr(test_data: Path) -> list[str]:
    """Settings of a run on real images."""
    folder = test_data / "nlvr"
    return ["data=llava", f"data.path={folder / 'conversations.json'}", f"data.image_root={folder}",
            "batch.global_samples=6",
            "train.adam_eps=1e-6", "train.learning_rate=1e-3", "seed=3"]


@pytest.fixture(scope="session")
def reference(ray_cluster: None, common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    train(folder, *common, f"run.steps={COMPARED}", "cluster.num_workers=2", "checkpoint.every_steps=0")
    return folder


@pytest.fixture(scope="session")
def undisturbed(reference: Path) -> list[float]:
    """Its losses."""
    return losses(reference)


@pytest.fixture
def start(ray_cluster: None, common: list[str], tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        runs.append(Run(tmp_path / "run", *common, "cluster.num_workers=3", "checkpoint.every_steps=0",
                        "run.steps=2000", *arguments))
        return runs[-1]

    yield begin
    for begun in runs:
        begun.end()
