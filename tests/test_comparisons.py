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
from benchmarks.planner import PEERS, published_cost
from benchmarks.planner_cases import MEMORIES
from dhp_ray.planner.cost import SYNCS
from tests.readme import ROOT, rows_of, section

TABLES = (ROOT / "benchmarks" / "README.md").read_text()
BEST, LAST, MODE = "best baseline over dhp", "last resort over dhp", "mode"
needs_data = pytest.mark.skipif("DHP_RAY_TEST_DATA" not in os.environ,
                                reason="DHP_RAY_TEST_DATA names no folder with cost/")


def table_after(words: str) -> list[dict[str, str]]:
    """The first table after these words, one row a line; what is in brackets in the head is left out."""
    lines = TABLES.partition(words)[2].partition("\n|")[2].partition("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return [dict(zip([name.partition(" (")[0] for name in head], cells, strict=True)) for cells in rows]


def mixes(sync: str, tokens_per_rank: int) -> list[dict[str, str]]:
    return table_after(f"`sync={sync}`, {tokens_per_rank:,} tokens a rank:\n")


def reach(column: str, sync: str, memories: tuple[int, ...] = MEMORIES) -> str:
    """From the least to the most in a column of a mode's tables."""
    values = [row[column] for tokens in memories for row in mixes(sync, tokens)]
    return f"{min(values, key=float)} to {max(values, key=float)}"


@pytest.mark.parametrize("sync", SYNCS)
def test_every_table_has_every_mix_and_its_ratios(sync: str) -> None:
    for tokens in MEMORIES:
        rows = mixes(sync, tokens)
        assert [row["sequences/ranks"] for row in rows] == [f"{count}/{num_ranks}" for count, num_ranks in PEERS]
        for row in rows:
            dhp_s, baselines = float(row["dhp"].split()[0]), [float(row[name]) for name in ("static", "static_best",
                                                                                            "pow2", "dhp_paper")]
            assert float(row[BEST]) == pytest.approx(min(baselines) / dhp_s, abs=0.011)
            assert float(row[LAST]) == pytest.approx(float(row["last resort"]) / dhp_s, abs=0.011)


def test_the_summary_is_the_tables() -> None:
    rows = table_after("## Planner beside its baselines")
    assert [(row["mode"], row["tokens a rank"])
            for row in rows] == [(sync, f"{tokens:,}") for sync in SYNCS for tokens in MEMORIES]
    for row in rows:
        memory = (int(row["tokens a rank"].replace(",", "")),)
        assert (row[BEST], row[LAST]) == (reach(BEST, row["mode"], memory), reach(LAST, row["mode"], memory))


def test_the_comparison_says_what_the_tables_say() -> None:
    cells = {row[0]: row[1] for row in rows_of("Compared with others")}
    found = re.findall(r"[\d.]+ to [\d.]+", cells["modelled step time, beside baselines"])
    assert found == [reach(BEST, "step"), reach(BEST, "micro_batch")]
    described = [min(steps) / min(others) for row in table_after("## What `auto` chooses")
                 for steps, others in [[[float(row[f"{sync}, {again}"]) for again in ("by pack", "all")
                                         if row[f"{sync}, {again}"] != "-"] for sync in SYNCS]] if steps]
    assert re.findall(r"[\d.]+ to [\d.]+", cells["how long `step` takes beside `micro_batch`, modelled"]) == [
        reach(MODE, "step"), f"{min(described):.2f} to {max(described):.2f}"]
    ratios = [row["dhp over the best of the last three"] for row in table_after("The peers' columns are constants of "
                                                                                "the script (`PEERS`)")]
    assert re.findall(r"[\d.]+ to [\d.]+",
                      cells["modelled step time, beside other planners"]) == [f"{min(ratios)} to {max(ratios)}"]


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
    row = row_of(count, num_ranks, 8192, sync, published_cost())
    [shown] = [row for row in mixes(sync, 8192) if row["sequences/ranks"] == f"{count}/{num_ranks}"]
    seconds_of = {"static": row.static_s, **dict(zip(("static_best", "pow2", "dhp_paper"), row.tuned_s)),
                  "last resort": row.last_resort_s}
    assert {name: f"{seconds:.2f}"
            for name, seconds in seconds_of.items()} == {name: shown[name] for name in seconds_of}
    assert shown["dhp"] == f"{row.dhp_s:.2f} ({row.bound_s:.2f})"
    assert shown[BEST] == f"{row.over_dhp:.2f}"
