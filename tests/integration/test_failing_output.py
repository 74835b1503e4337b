"""Runs whose output fails while they train: they go on to their end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.faults import expected_ledger
from tests.integration.jobs import ROOT, command, ledger

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("where", ["| grep -m1 step", "> /dev/full", "> /dev/full 2>&1", ">&- 2>&-"])
def test_the_run_goes_on(where: str, common: list[str], tmp_path: Path) -> None:
    words = command("train.py", f"run.dir={tmp_path / 'run'}", *common, "cluster.num_workers=2", "run.steps=6")
    done = subprocess.run(["bash", "-c", f'"$@" {where}; exit ${{PIPESTATUS[0]}}', "bash", *words], cwd=ROOT, text=True,
                          capture_output=True, timeout=240, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert ledger(tmp_path / "run") == expected_ledger(tmp_path / "run", 6)
    assert (tmp_path / "run" / "model").is_dir()
