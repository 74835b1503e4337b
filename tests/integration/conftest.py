"""Runs that something happens to: what they are started with, and the run that nothing happened to beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak import SETTINGS
from benchmarks.worlds import data_overrides
from tests.integration.faults import COMPARED, Run, Start
from tests.integration.jobs import losses, train


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
    for run in runs:
        run.end()
