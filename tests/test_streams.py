"""Commands whose standard output or error fails: a closed pipe, a full disk, streams that were closed before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

LINES = """
import sys
from dhp_ray.streams import run_command
def main(argv):
    for number in range(3000):
        print("line", number)
        print("line", number, file=sys.stderr)
    open(argv[0], "w").write("done")
    return 0
sys.exit(run_command(main{}))
"""


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash; its `status` is that of the first command of the pipe."""
    return subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], cwd=ROOT, text=True,
                          capture_output=True, timeout=120, env=os.environ | {"PYTHON": sys.executable} | variables)


@pytest.mark.parametrize("goes_on", ["", ", goes_on=True"])
@pytest.mark.parametrize("where", ["| true", "2>&1 | head -1", "| head -1", ">&- 2>&-", "<&- >&- 2>&-", "2>&-"])
def test_a_command_whose_output_nobody_reads_goes_on_quietly(where: str, goes_on: str, tmp_path: Path) -> None:
    code = LINES.format(goes_on)
    done = shell(f'"$PYTHON" -c "$CODE" {tmp_path / "file"} 2>{tmp_path / "errors"} {where}', CODE=code)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "done"
    assert "Traceback" not in done.stderr + (tmp_path / "errors").read_text()
    assert "Exception ignored" not in done.stderr + (tmp_path / "errors").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(("goes_on", "status", "level"), [("", 1, "error"), (", goes_on=True", 0, "warning")])
def test_a_full_disk_is_said_in_one_line(goes_on: str, status: int, level: str, tmp_path: Path) -> None:
    code = LINES.format(goes_on).replace('        print("line", number, file=sys.stderr)\n', "")
    done = shell(f'"$PYTHON" -c "$CODE" {tmp_path / "file"} > /dev/full', CODE=code)
    assert done.returncode == status
    assert done.stderr == f"{level}: standard output was not written whole: No space left on device\n"
    assert (tmp_path / "file").read_text() == "done"
    both = shell(f'"$PYTHON" -c "$CODE" {tmp_path / "file"} > /dev/full 2>&1', CODE=code)
    assert (both.returncode, both.stderr) == (status, "")


@pytest.mark.parametrize("job", sorted(path.name for path in (ROOT / "jobs").glob("*.py")))
def test_every_job_is_such_a_command(job: str) -> None:
    assert "    sys.exit(run_command(" in (ROOT / "jobs" / job).read_text()


def test_help_into_a_pipe_that_closes_and_onto_a_full_disk() -> None:
    done = shell('"$PYTHON" -u jobs/train.py --help | true')
    assert (done.returncode, done.stderr) == (0, "")
    done = shell('"$PYTHON" jobs/plan.py --help > /dev/full')
    assert done.stderr == "error: standard output was not written whole: No space left on device\n"
    assert done.returncode == 1
