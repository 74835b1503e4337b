from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

PROGRAM = str(Path(__file__).resolve().parents[2] / "jobs/prepare_data.py")
prepare = runpy.run_path(PROGRAM)["main"]
"""What the program does with its arguments; returns the exit status."""


def test_help_names_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(["--help"]) == 0
    assert "data.synthetic.long_fraction=0.06" in capsys.readouterr().out


def test_a_set_is_written_once_and_again_when_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "set.parquet"
    arguments = [f"data.path={path}", "data.synthetic.num_samples=12"]
    first = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=120)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.startswith(f"{path}: 12 samples, ")
    written = path.stat()
    assert prepare(arguments) == 0
    assert capsys.readouterr().out == f"{path}: 12 samples are there already\n"
    assert path.stat().st_mtime_ns == written.st_mtime_ns
    assert prepare([*arguments, "seed=3"]) == 0
    assert "replacing a set with seed=0 by one with seed=3" in capsys.readouterr().out
    assert pq.read_metadata(path).num_rows == 12


def test_refusals_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "file").write_text("")
    for status, message, arguments in [
        (2, "data.format: got llava; allowed here: synthetic", ["data=llava", "data.path=x"]),
        (2, "data.path: got '", [f"data.path={tmp_path / 'set'}"]),
        (2, "data.path: got s3://bucket/set.parquet; allowed: a file or folder of this machine (URIs are not read)",
         ["data.path=s3://bucket/set.parquet"]),
        (2, "is a folder; allowed here: a file name", [f"data.path={tmp_path / 'folder.parquet'}"]),
        (2, "data.synthetic.num_sample: no such key", ["data.synthetic.num_sample=3"]),
        (1, "holds other data; allowed: a name that is free", [f"data.path={tmp_path / 'other.parquet'}"]),
        (1, "text.parquet is not parquet", [f"data.path={tmp_path / 'text.parquet'}"]),
        (1, "file/set.parquet cannot be written: ", [f"data.path={tmp_path / 'file/set.parquet'}"]),
    ]:
        assert prepare(arguments) == status
        said = capsys.readouterr().err
        assert message in said
        assert said.startswith("error: ")
        assert said.count("\n") == 1
    assert pq.read_table(tmp_path / "other.parquet").to_pydict() == {"a": [1]}
