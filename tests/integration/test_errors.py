"""What users get wrong, through the entry point: the exit status and one clear line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.jobs import lines, run


def refused(status: int, *arguments: str) -> str:
    """The one line that a failing start prints."""
    ended = run("train.py", *arguments)
    assert ended.status == status, ended.output + ended.errors
    said = [line for line in ended.error_lines if line.startswith("error: ")]
    assert len(said) == 1, ended.errors
    assert "Traceback" not in ended.output + ended.errors
    return said[0]


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


@pytest.mark.parametrize("damage", ["absent", "header", "body"])
def test_a_bad_image_is_left_out_and_listed(ray_cluster: None, conversations: Path, damage: str) -> None:
    rows = json.loads((conversations / "rows.json").read_text())
    bad = rows[3]
    victim = conversations / (bad["image"] if isinstance(bad["image"], str) else bad["image"][0])
    content = victim.read_bytes()
    for row in rows:  # the image must be in one conversation only
        assert row is bad or victim.name not in json.dumps(row)
    victim.unlink()
    if damage == "header":
        victim.write_bytes(b"not an image")
    elif damage == "body":
        victim.write_bytes(content[: len(content) // 2])
    ended = run("train.py", *llava(conversations))
    assert ended.status == 0, ended.errors
    skipped = lines(conversations / "run", "skipped.jsonl")
    assert [row["id"] for row in skipped] == [bad["id"]]
    assert f"sample {bad['id']} left out" in ended.output
    used = [sample_id for line in lines(conversations / "run", "ledger.jsonl") for sample_id in line["sample_ids"]]
    assert bad["id"] not in used
    assert len(used) == len(set(used)) == 7


def test_a_bad_image_ends_the_run_when_asked(ray_cluster: None, conversations: Path) -> None:
    rows = json.loads((conversations / "rows.json").read_text())
    victim = conversations / (rows[3]["image"] if isinstance(rows[3]["image"], str) else rows[3]["image"][0])
    victim.write_bytes(b"not an image")
    line = refused(1, *llava(conversations), "data.on_error=fail")
    assert rows[3]["id"] in line


def test_a_folder_of_another_configuration(ray_cluster: None, conversations: Path) -> None:
    assert run("train.py", *llava(conversations)).status == 0
    line = refused(2, *llava(conversations), "seed=5")
    assert "seed: got 5" in line
