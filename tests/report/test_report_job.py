"""jobs/report.py as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dhp_ray.storage import Folder
from tests.checkout import ROOT, job_of
from tests.report.runs import write_run

main = job_of("report").main


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "jobs" / "report.py"), *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=240, check=False)


def test_a_report_is_written_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 2)
    done = report(f"run.dir={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/report.html: 2 steps\n"
    assert "2 of 2 batches" in (tmp_path / "report.html").read_text()
    assert main(["--config", str(tmp_path / "config.yaml")]) == 0
    assert capsys.readouterr().out == done.stdout


def test_a_run_on_an_object_store(tmp_path: Path, object_store: str) -> None:
    write_run(tmp_path, 2)
    uri = f"s3://bucket/{tmp_path.name}/run{object_store}"
    folder = Folder(uri)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            folder.upload(path, path.relative_to(tmp_path).as_posix())
    assert main([f"run.dir={uri}"]) == 0
    assert b"2 of 2 batches" in folder.read("report.html")


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, damaged, file = tmp_path / "empty", tmp_path / "damaged", tmp_path / "file"
    file.write_text("")
    write_run(empty, 0)
    write_run(damaged, 1)
    (damaged / "metrics.jsonl").write_text("x\n")
    cases = [(2, "no run in", f"run.dir={tmp_path / 'absent'}"), 
             (2, "run.dri=x: not understood; allowed: --config FILE, --help, run.dir=", "run.dri=x"),
             (2, "model=tiny: not understood; allowed: ", "model=tiny"),
             (2, " is a file; allowed: ", f"run.dir={file}"),
             (1, "not finished a step yet", f"run.dir={empty}"),
             (1, "metrics.jsonl: line 1", f"run.dir={damaged}"),
             (1, "not a folder that storage knows", "run.dir=nonsense://bucket/x")]
    for status, words, argument in cases:
        assert main([argument]) == status
        said = capsys.readouterr()
        assert said.out == ""
        assert words in said.err
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1


def test_help_names_the_argument() -> None:
    done = report("--help")
    assert done.returncode == 0
    assert "run.dir=FOLDER" in done.stdout
