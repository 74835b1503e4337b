from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]


def prepare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "jobs/prepare_data.py"), *arguments], capture_output=True,
                          text=True, timeout=120)


def test_help_names_the_settings() -> None:
    ended = prepare("--help")
    assert ended.returncode == 0
    assert "data.synthetic.long_fraction=0.06" in ended.stdout


def test_a_set_is_written_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    arguments = [f"data.path={path}", "data.synthetic.num_samples=40"]
    first = prepare(*arguments)
    assert (first.returncode, first.stderr) == (0, "")
    assert f"{path}: 40 samples, " in first.stdout
    written = path.stat()
    second = prepare(*arguments)
    assert second.stdout == f"{path}: 40 samples are there already\n"
    assert path.stat().st_mtime_ns == written.st_mtime_ns
    third = prepare(*arguments, "seed=3")
    assert "replacing a set with seed=0 by one with seed=3" in third.stdout
    assert pq.read_metadata(path).num_rows == 40


def test_refusals_are_one_line_each(tmp_path: Path) -> None:
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
        ended = prepare(*arguments)
        assert ended.returncode == status, ended
        assert message in ended.stderr
        assert ended.stderr.startswith("error: ")
        assert ended.stderr.count("\n") == 1
    assert pq.read_table(tmp_path / "other.parquet").to_pydict() == {"a": [1]}
