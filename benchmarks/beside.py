"""This checkout's planner over another checkout's, old or new: modelled seconds and planning time by table.

    DHP_RAY_TEST_DATA=FOLDER python benchmarks/beside.py CHECKOUT

A process plans with each, row by row in turns (`benchmarks/planner_cases.py`); planning time is the least of three. The
search is a heuristic, so some rows get shorter by what makes others longer. Ends with 1 if a row takes over 0.2 %
longer than in the other checkout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.planner_cases import Figures, Row, rows  # noqa: E402

TIMES = 3
"""How often each row is planned."""

LONGER, SLOWER = 1.002, 1.1
"""What is reported of a row: its makespan over the other checkout's, and its planning time."""


class CheckoutPlanner:
    """A process that plans rows with one copy of the package."""

    def __init__(self, package: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "benchmarks" / "planner_cases.py")]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if Path(self._answer()) != package:
            raise RuntimeError(f"{package}: another package is imported")

    def figures(self, row: int) -> Figures:
        assert self.process.stdin is not None
        print(row, file=self.process.stdin, flush=True)
        return Figures(*json.loads(self._answer()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the planner of {self.process.args} ended with {self.process.wait()}")
        return line.strip()


@contextmanager
def planner_of(checkout: Path) -> Iterator[CheckoutPlanner]:
    """The planner of a copy of a checkout's package."""
    with tempfile.TemporaryDirectory() as folder:
        found = CheckoutPlanner(Path(shutil.copytree(checkout / "dhp_ray", Path(folder) / "dhp_ray")))
        try:
            yield found
        finally:
            found.close()


def measured(found: Sequence[CheckoutPlanner], chosen: Sequence[int]) -> list[list[Figures]]:
    """Figures of each planner for each row."""
    figures: list[list[Figures]] = [[] for _ in found]
    for row in chosen:
        seen = [[planner.figures(row) for planner in found] for _ in range(TIMES)]
        for of_planner, each in zip(figures, zip(*seen)):
            of_planner.append(each[0]._replace(planning_s=min(one.planning_s for one in each)))
    return figures


class Loss(NamedTuple):
    """A table of one planner over another's: makespans in the mean and of the worst row, planning time, new groups."""

    mean: float
    worst: float
    planning: float
    groups: float
    worst_row: str


def losses(tables: Sequence[Row], before: Sequence[Figures], after: Sequence[Figures]) -> dict[str, Loss]:
    """By table."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(tables):
        places[row.table].append(place)
    found = {}
    for table, inside in places.items():
        ratios = {tables[place].name: after[place].makespan_s / before[place].makespan_s for place in inside}
        worst = max(ratios, key=lambda name: ratios[name])
        found[table] = Loss(
            math.fsum(ratios.values()) / len(ratios) - 1,
            ratios[worst] - 1,
            sum(after[place].planning_s for place in inside) / sum(before[place].planning_s for place in inside),
            sum(after[place].new_groups for place in inside)
            / max(1, sum(before[place].new_groups for place in inside)),
            worst,
        )
    return found


def print_tables(by_table: Mapping[str, Loss]) -> None:
    """A row for each table."""
    print("| table | makespan, mean | of the worst row | planning time | new groups |\n" + "|---" * 5 + "|")
    for table, loss in by_table.items():
        print(f"| {table} | {100 * loss.mean:+.3f} % | {100 * loss.worst:+.2f} % ({loss.worst_row}) | "
              f"{loss.planning:.2f} | {loss.groups:.2f} |", flush=True)


def main(words: list[str]) -> int:
    """Print this checkout's tables over another's, and the rows that got worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    checkout = parser.parse_args(words).checkout.resolve()
    tables = rows()
    with planner_of(checkout) as old, planner_of(ROOT) as new:
        before, after = measured([old, new], range(len(tables)))
    print_tables(losses(tables, before, after))
    num_longer = 0
    for row, then, now in zip(tables, before, after):
        longer, slower = now.makespan_s / then.makespan_s, now.planning_s / then.planning_s
        num_longer += longer > LONGER
        if longer > LONGER or (slower > SLOWER and then.planning_s > 1e-3):
            planning = f"planning {1e3 * then.planning_s:.1f} ms to {1e3 * now.planning_s:.1f} ms"
            print(f"{row.table}, {row.name}: makespan {100 * (longer - 1):+.2f} %, {planning}")
    print(f"{num_longer} of {len(tables)} rows are more than {100 * (LONGER - 1):.1f} % longer")
    return int(num_longer > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
