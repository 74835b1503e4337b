"""benchmarks/beside.py compares what is measured by table."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.beside import Loss, losses
from benchmarks.planner_cases import Figures, Row, rows
from tests.readme import ROOT


def test_losses_are_ratios_by_table() -> None:
    tables = [Row("gap", "a", list), Row("gap", "b", list), Row("pool", "c", list)]
    before = [Figures(1.0, 1.0, 0.1, 4), Figures(2.0, 1.0, 0.3, 4), Figures(1.0, 1.0, 1.0, 0)]
    after = [Figures(1.0, 1.0, 0.1, 4), Figures(2.2, 1.0, 0.1, 8), Figures(0.5, 1.0, 2.0, 0)]
    found = losses(tables, before, after)
    assert found["gap"] == Loss(pytest.approx(0.05), pytest.approx(0.1), pytest.approx(0.5), pytest.approx(1.5), "b")
    assert found["pool"].mean == pytest.approx(-0.5)


def test_rows_have_names_of_their_own() -> None:
    assert len({(row.table, row.name) for row in rows()}) == len(rows()) == 326


def test_the_command_runs_in_a_checkout() -> None:
    found = subprocess.run([sys.executable, "benchmarks/beside.py"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2
    assert "the following arguments are required: CHECKOUT" in found.stderr
