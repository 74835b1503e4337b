"""benchmarks/ablation.py fits the planner as it is: every variant finds its text, and what is measured is compared."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.ablation import VARIANTS, Loss, Variant, VariantError, file_with, losses, worth
from benchmarks.planner_cases import Figures, Row, rows
from tests.readme import ROOT

SOURCES = {path: path.read_text() for path in (ROOT / "dhp_ray" / "planner").rglob("*.py")}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_finds_its_text(variant: Variant) -> None:
    path = file_with(variant.text, variant.name, SOURCES)
    compile(SOURCES[path].replace(variant.text, variant.replacement), str(path), "exec")
    assert variant.text != variant.replacement


def test_names_are_unique() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_a_text_that_is_gone_is_an_error_of_one_line() -> None:
    with pytest.raises(VariantError, match=r"^no such: 'nowhere = 1' stands 0 times in dhp_ray/planner; it must once$"):
        file_with("nowhere = 1", "no such", SOURCES)


def test_losses_are_ratios_by_table() -> None:
    tables = [Row("gap", "a", list), Row("gap", "b", list), Row("pool", "c", list)]
    before = [Figures(1.0, 1.0, 0.1, 4), Figures(2.0, 1.0, 0.3, 4), Figures(1.0, 1.0, 1.0, 0)]
    after = [Figures(1.0, 1.0, 0.1, 4), Figures(2.2, 1.0, 0.1, 8), Figures(0.5, 1.0, 2.0, 0)]
    found = losses(tables, before, after)
    assert found["gap"] == Loss(pytest.approx(0.05), pytest.approx(0.1), pytest.approx(0.5), pytest.approx(1.5), "b")
    assert found["pool"].mean == pytest.approx(-0.5)
    assert worth("v", found) == "| v | +5.000 % (gap) | +10.00 % (gap, b) | 0.50 (gap) to 2.00 (pool) | 1.50 |"


def test_rows_have_names_of_their_own() -> None:
    assert len({(row.table, row.name) for row in rows()}) == len(rows()) == 326


def test_an_unknown_variant_is_refused() -> None:
    command = [sys.executable, "benchmarks/ablation.py", "step: no plan"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2
    assert "step: no plan: no such variant; allowed: one least degree; " in found.stderr


def test_help_names_the_variants() -> None:
    found = subprocess.run([sys.executable, "benchmarks/ablation.py", "--help"], cwd=ROOT, capture_output=True,
                           text=True)
    assert found.returncode == 0, found.stderr
    assert "one least degree" in found.stdout
