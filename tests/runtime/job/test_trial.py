"""What a trial of Ray Tune makes of a run's settings; whole sweeps: tests/integration/test_fit.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp_ray.config import Config, ConfigError, load
from dhp_ray.runtime.job.fit import ORIGINAL_FOLDER, Trial, callers_folder, last_metrics
from dhp_ray.runtime.records.run_records import RunRecords
from dhp_ray.storage import Folder
from tests.runtime.records.test_run_records import commit


def config_of(folder: Path, *words: str) -> Config:
    return load(["data.format=synthetic", "data.path=unused", f"run.dir={folder}", *words])


def test_relative_paths_are_taken_from_where_the_process_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ORIGINAL_FOLDER, str(tmp_path))
    assert callers_folder("trial_1") == tmp_path
    assert callers_folder("") == Path()
    monkeypatch.delenv(ORIGINAL_FOLDER)
    assert callers_folder("trial_1") == Path()


def test_each_trial_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = (Trial(name, config_of(tmp_path / "sweep")) for name in ("trial_1", "trial_2"))
    assert [trial.config.run.dir for trial in (first, second)] == [
        str(tmp_path / "sweep" / "trial_1"), str(tmp_path / "sweep" / "trial_2")]


def test_a_trial_cannot_grow(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.max_workers: got 3 in a trial of Ray Tune, .*; allowed: 0$"):
        Trial("trial_1", config_of(tmp_path, "cluster.num_workers=2", "cluster.max_workers=3"))


def test_a_finished_run_has_the_metrics_of_its_last_step(tmp_path: Path) -> None:
    """Whose second start commits no step."""
    folder = Folder(str(tmp_path))
    assert last_metrics(folder) == {}
    commit(RunRecords(folder), 1, 5)
    assert last_metrics(folder)["step"] == 5
