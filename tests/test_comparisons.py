"""The comparisons in README.md, docs/other-trainers.md and benchmarks/README.md agree with each other, and with what
benchmarks/comparisons.py computes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from benchmarks.comparisons import row_of
from benchmarks.planner import PEERS, bimodal, planned, published_cost
from benchmarks.planner_cases import MEMORIES
from dhp_ray.planner.cost.model import SYNCS
from tests.readme import ROOT, rows_of, section

TABLES = (ROOT / "benchmarks" / "README.md").read_text()
TOKENS = 8192
"""A rank's memory in the page's tables; the command prints those of all MEMORIES."""
BEST, LAST, MODE = "best baseline over dhp", "last resort over dhp", "mode"
needs_data = pytest.mark.skipif("DHP_RAY_TEST_DATA" not in os.environ,
                                reason="DHP_RAY_TEST_DATA names no folder with cost/")


def table_after(words: str) -> list[dict[str, str]]:
    """The first table after these words, one row a line; what is in brackets in the head is left out."""
    lines = TABLES.partition(words)[2].partition("\n|")[2].partition("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return [dict(zip([name.partition(" (")[0] for name in head], cells, strict=True)) for cells in rows]


def mixes(sync: str) -> list[dict[str, str]]:
    return table_after(f"`sync={sync}`, {TOKENS:,} tokens a rank:\n")


def reach(column: str, sync: str) -> str:
    """From the least to the most in a column of a mode's table."""
    values = [row[column] for row in mixes(sync)]
    return f"{min(values, key=float)} to {max(values, key=float)}"


def reaches() -> list[str]:
    """How far the best baseline is behind, as the page says it of every memory, first of `step`."""
    [said] = re.findall(r"^In `step` the best baseline takes .*", TABLES, re.MULTILINE)
    return re.findall(r"[\d.]+ to [\d.]+\d", said)


def ratios_of(name: str) -> list[str]:
    [said] = [row[1] for row in rows_of("Compared with others") if row[0] == name]
    return re.findall(r"[\d.]+ to [\d.]+\d", said)


@pytest.mark.parametrize("sync", SYNCS)
def test_a_table_has_every_mix_and_its_ratios(sync: str) -> None:
    rows = mixes(sync)
    assert [row["sequences/ranks"] for row in rows] == [f"{count}/{num_ranks}" for count, num_ranks in PEERS]
    for row in rows:
        dhp_s, baselines = float(row["dhp"].split()[0]), [float(row[name]) for name in ("static", "static_best", "pow2",
                                                                                        "dhp_paper")]
        assert float(row[BEST]) == pytest.approx(min(baselines) / dhp_s, abs=0.011)
        assert float(row[LAST]) == pytest.approx(float(row["last resort"]) / dhp_s, abs=0.011)


def test_what_is_said_of_every_memory_is_said_of_the_tables() -> None:
    said = reaches()
    assert len(said) == len(SYNCS) * len(MEMORIES)
    assert [said[0], said[len(MEMORIES)]] == [reach(BEST, "step"), reach(BEST, "micro_batch")]


def test_the_comparison_says_what_the_page_says() -> None:
    said = reaches()
    whole = [f"{min(part.split()[0] for part in parts)} to {max(part.split()[-1] for part in parts)}"
             for parts in (said[: len(MEMORIES)], said[len(MEMORIES) :])]
    assert ratios_of("modelled step time, beside baselines") == whole
    assert ratios_of("how long `step` takes beside `micro_batch`, modelled") == [reach(MODE, "step")]
    [alike] = [said for name, said, _ in rows_of("Compared with others")[1:] if name.endswith("with the same choices")]
    shown = " ".join(cell for row in table_after("scale.py fair`") for cell in row.values())
    figures = re.findall(r"\d\.\d+", alike)
    assert len(figures) > 6
    assert [figure for figure in figures if figure not in shown] == []


@needs_data
def test_the_comparison_with_other_planners_is_what_is_computed() -> None:
    cost = published_cost()
    ratios = [planned(bimodal(count, num_ranks), num_ranks, cost, sync="micro_batch").predicted_time_s / min(others[1:])
              for (count, num_ranks), others in PEERS.items()]
    found = f"{min(ratios):.2f} to {max(ratios):.2f}"
    assert ratios_of("modelled step time, beside other planners") == [found]
    assert f"`dhp` takes {found} of the best" in TABLES


def test_readme_says_what_the_comparison_says() -> None:
    """Every figure of README's short table stands in the long one."""
    figures = [figure for row in rows_of("What it does that others do not")
               if row[-1].startswith(("modelled", "measured"))
               for cell in row for figure in re.findall(r"\d[\d,]*\.\d+|\d+ ms", cell)]
    compared = section("Compared with others")
    assert len(figures) > 10
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}", compared)] == []


def test_the_command_runs_in_a_checkout() -> None:
    """Whether or not the folder of benchmarks is on the caller's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([sys.executable, "benchmarks/comparisons.py", "sometimes"], cwd=ROOT, env=environment,
                           capture_output=True, text=True)
    assert (found.returncode,
            found.stderr) == (2, "comparisons.py: sometimes: allowed: step, micro_batch, 8192, 32768, 131072\n")


@needs_data
@pytest.mark.parametrize(("sync", "count", "num_ranks"), [("step", 128, 8), ("micro_batch", 128, 64)])
def test_the_tables_are_what_is_computed(sync: str, count: int, num_ranks: int) -> None:
    row = row_of(count, num_ranks, TOKENS, sync, published_cost())
    [shown] = [row for row in mixes(sync) if row["sequences/ranks"] == f"{count}/{num_ranks}"]
    seconds_of = {"static": row.static_s, **dict(zip(("static_best", "pow2", "dhp_paper"), row.tuned_s)),
                  "last resort": row.last_resort_s}
    assert {name: f"{seconds:.2f}"
            for name, seconds in seconds_of.items()} == {name: shown[name] for name in seconds_of}
    assert shown["dhp"] == f"{row.dhp_s:.2f} ({row.bound_s:.2f})"
    assert shown[BEST] == f"{row.over_dhp:.2f}"
