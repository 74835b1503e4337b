"""What users get wrong, through the entry point: the exit status and one clear line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.jobs import refused, run


@pytest.fixture
def conversations(test_data: Path, tmp_path: Path) -> Path:
    """Eight conversations of real images in a folder of their own."""
    rows = json.loads((test_data / "nlvr" / "conversations.json").read_text())[:8]
    (tmp_path / "images").mkdir()
    for row in rows:
        for name in [row["image"]] if isinstance(row["image"], str) else row["image"]:
            shutil.copy(test_data / "nlvr" / name, tmp_path / name)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return tmp_path


def llava(folder: Path) -> list[str]:
    return ["data=llava", f"data.path={folder / 'rows.json'}", f"data.image_root={folder}", f"run.dir={folder / 'run'}", "run.steps=2",
            "batch.global_samples=4", "cluster.num_workers=1", "planner.tokens_per_rank=4096"]


def test_a_wrong_key() -> None:
    assert "train.learning_rat: no such key" in refused(2, "train.learning_rat=1")


def test_a_missing_file(ray_cluster: None, tmp_path: Path) -> None:
    line = refused(1, "data=llava", f"data.path={tmp_path / 'absent.json'}", f"run.dir={tmp_path / 'run'}", "cluster.num_workers=1")
    assert str(tmp_path / "absent.json") in line


def test_more_workers_than_the_cluster_has_room_for(ray_cluster: None, tmp_path: Path) -> None:
    line = refused(1, f"run.dir={tmp_path / 'run'}", "cluster.num_workers=64", "cluster.start_timeout_s=2")
    assert "cluster.num_workers=64: needs 6.4 CPU; the cluster has 2 CPU in all" in line


def test_a_folder_of_another_configuration(ray_cluster: None, conversations: Path) -> None:
    assert run("train.py", *llava(conversations)).status == 0
    line = refused(2, *llava(conversations), "seed=5")
    assert "seed: got 5" in line
