"""What users get wrong in a command, through the entry point: the exit status and one clear line.

What is refused before Ray starts is in tests/runtime/job/test_preflight.py, bad samples in test_bad_data.py, bad
checkpoints in test_bad_checkpoints.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.worlds import data_overrides
from tests.data.samples import talk, write_rows
from tests.integration.jobs import refused, run


def test_a_wrong_key() -> None:
    assert refused(2, "train.learning_rat=1").startswith("error: train.learning_rat: no such key")


@pytest.mark.slow
def test_a_file_that_goes_bad_behind_its_first_rows(ray_cluster: None, tmp_path: Path) -> None:
    """Which only the index finds, once Ray is there."""
    path = write_rows(tmp_path / "rows.json", [{"conversations": talk("Name a colour.", "Red.")}] * 100)
    path.write_bytes(path.read_bytes()[:-1])
    line = refused(1, "data=llava", f"data.path={path}", f"run.dir={tmp_path / 'run'}", "cluster.num_workers=1")
    assert line == f"error: data.path: {path} is not JSON: the array that starts at byte 0 does not end"


def test_more_workers_than_the_cluster_has_room_for(ray_cluster: None, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.json", [{"conversations": talk("Name a colour.", "Red.")}])
    line = refused(1, "data=llava", f"data.path={path}", f"run.dir={tmp_path / 'run'}", "cluster.num_workers=64",
                   "cluster.start_timeout_s=2")
    assert "cluster.num_workers=64: needs 6.4 CPU; the cluster has 2 CPU in all" in line


@pytest.mark.slow
def test_an_extra_that_the_workers_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose nodes say that they have NPUs, on machines without torch_npu."""
    if importlib.util.find_spec("torch_npu"):
        pytest.skip("torch_npu is installed")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"NPU": 2}')
    ended = run("train.py", "cluster.device=npu", "cluster.num_workers=1", "train.precision=bf16",
                f"run.dir={tmp_path / 'run'}", *data_overrides("", tmp_path))
    assert ended.status == 1
    # Ray adds a traceback of its own: such a node has Ascend's `acl`
    (line,) = [line for line in ended.error_lines if line.startswith("error: ")]
    assert (
        "cluster.device: got 'npu', but torch_npu is not installed on this machine (pip install -e '.[npu]')" in line
    )
