"""What each constant and each stage of the planner's search is worth: modelled seconds and planning time without it.

    DHP_RAY_TEST_DATA=FOLDER python benchmarks/ablation.py    all of VARIANTS, each alone
    ... benchmarks/ablation.py "step: one order" "no improver"         these, each alone
    ... benchmarks/ablation.py --together "step: one order" "no improver"   these as one planner
    ... benchmarks/ablation.py --table "small: step"    on the batches of this table alone (or of several)
    ... benchmarks/ablation.py --beside FOLDER          this checkout's planner over another checkout's, old or new

Constants are compiled into machine code, so each variant is a copy of the package. A process plans with it, row by row
in turns with the planner as it is (`benchmarks/planner_cases.py`). The search is a heuristic, so some rows get shorter
without a part of it. A variant's worth is the mean loss over the rows of the table that loses most.
`--beside` ends with 1 if a row takes over 0.2 % longer than in the other checkout.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.planner_cases import Figures, Row, rows  # noqa: E402


class Variant(NamedTuple):
    """A name, a text that stands once in dhp_ray/planner, and what stands there instead."""

    name: str
    text: str
    replacement: str


VARIANTS = (
    Variant("one least degree", "LEAST_DEGREES = (1, 2, 3, 4, 6, 8)", "LEAST_DEGREES = (1,)"),
    Variant("no ways with fuller packs", "for tokens in sizes:", "for tokens in sizes[:0]:"),
    Variant("step: no micro-batches as a start", "add(each.without_barriers", "0 and add(each.without_barriers"),
    Variant("one start of a small batch is improved", "IMPROVED = 4", "IMPROVED = 1"),
    Variant("micro_batch: nothing wide", "NARROW, LIMITS, WIDTH, WORK = 2, 24, 8, 60_000",
            "NARROW, LIMITS, WIDTH, WORK = 2, 24, 1, 60_000"),
    Variant("micro_batch: no share for encoding", "ENCODE_FACTORS = (0.9, 1.0, 1.1)", "ENCODE_FACTORS = ()"),
    Variant("step: one order", "SMALL, ORDERS = 2_000, 16", "SMALL, ORDERS = 2_000, 0"),
    Variant("no improver", "TRIAL_S, MOST = 0.02,", "TRIAL_S, MOST = 0.0,"),
    Variant("the improver takes nothing that is worse", "THRESHOLD, CYCLES = 0.2, 8", "THRESHOLD, CYCLES = 0.0, 8"),
    Variant("step: no groups of the pool", "REUSE = ((3e-3, 1.0), (3e-3, 0.1), (9e-3, 0.01))", "REUSE = ()"),
)

AT_ONCE = 5
"""Variants whose processes are alive together."""

LONGER, SLOWER = 1.002, 1.1
"""What --beside reports: a row's makespan over the other checkout's, and a table's planning time."""


class VariantError(ValueError):
    """A variant that does not fit the source; the message is one line."""


class Planner:
    """A process that plans rows with one copy of the package."""

    def __init__(self, package: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "benchmarks" / "planner_cases.py")]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if Path(self._answer()) != package:
            raise VariantError(f"{package}: another package is imported")

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
            raise VariantError(f"the planner of {self.process.args} ended with {self.process.wait()}")
        return line.strip()


def copied(checkout: Path, folder: Path) -> Path:
    """A copy of a checkout's package."""
    return Path(shutil.copytree(checkout / "dhp_ray", folder / "dhp_ray"))


def altered(package: Path, variants: Sequence[Variant]) -> None:
    """Apply variants to a copy of the package, one after another."""
    sources = {path: path.read_text() for path in (package / "planner").rglob("*.py")}
    cache = file_with("DIGEST = hashlib", "the copy's cache", sources)
    digest = digest_of(package, cache)
    recompile = False
    for variant in variants:
        path = file_with(variant.text, variant.name, sources)
        recompile |= "@compiled" in sources[path] or "@inner" in sources[path]
        sources[path] = sources[path].replace(variant.text, variant.replacement)
        path.write_text(sources[path])
    if not recompile:  # the machine code of the other files is still right
        with cache.open("a") as file:
            file.write(f"\nDIGEST = {digest!r}\n")


def file_with(text: str, name: str, sources: Mapping[Path, str]) -> Path:
    """The file of the planner in which a text stands once, and in no other."""
    found = [path for path, source in sources.items() for _ in range(source.count(text))]
    if len(found) != 1:
        raise VariantError(f"{name}: {text!r} stands {len(found)} times in dhp_ray/planner; it must once")
    return found[0]


def digest_of(package: Path, cache: Path) -> str:
    """What the version of the package's machine code is made of."""
    module = ".".join(cache.relative_to(package.parent).with_suffix("").parts)
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", f"from {module} import DIGEST; print(DIGEST)"]
    return subprocess.run(command, check=True, text=True, capture_output=True, env=environment).stdout.strip()


@contextmanager
def planners(checkout: Path, altered_by: Sequence[Sequence[Variant]]) -> Iterator[list[Planner]]:
    """The planner of a checkout, and one for each list of variants."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = copied(checkout, folder / "plain")
        found = [Planner(plain)]
        stack.callback(found[0].close)
        for number, variants in enumerate(altered_by):
            package = copied(folder / "plain", folder / str(number))
            altered(package, variants)
            found.append(Planner(package))
            stack.callback(found[-1].close)
        yield found


def measured(found: Sequence[Planner], chosen: Sequence[int], times: int) -> list[list[Figures]]:
    """Figures of each planner for each row; planning time is the least of several times, in turns."""
    figures: list[list[Figures]] = [[] for _ in found]
    for row in chosen:
        for repeat in range(times):
            for place, planner in enumerate(found):
                now = planner.figures(row)
                if repeat == 0:
                    figures[place].append(now)
                elif now.planning_s < figures[place][-1].planning_s:
                    figures[place][-1] = now
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


def worth(name: str, by_table: Mapping[str, Loss]) -> str:
    """A row of the table of variants."""
    table = max(by_table, key=lambda table: by_table[table].mean)
    worst = max(by_table, key=lambda table: by_table[table].worst)
    slowest = max(by_table, key=lambda table: by_table[table].planning)
    fastest = min(by_table, key=lambda table: by_table[table].planning)
    cells = [
        name,
        f"{100 * by_table[table].mean:+.3f} % ({table})",
        f"{100 * by_table[worst].worst:+.2f} % ({worst}, {by_table[worst].worst_row})",
        f"{by_table[fastest].planning:.2f} ({fastest}) to {by_table[slowest].planning:.2f} ({slowest})",
        f"{max(loss.groups for loss in by_table.values()):.2f}",
    ]
    return line(cells)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def print_tables(by_table: Mapping[str, Loss]) -> None:
    """A row for each table."""
    print(
        line(["table", "makespan, mean", "of the worst row", "planning time", "new groups"]) + "\n" + "|---" * 5 + "|"
    )
    for table, loss in by_table.items():
        worst = f"{100 * loss.worst:+.2f} % ({loss.worst_row})"
        print(
            line([table, f"{100 * loss.mean:+.3f} %", worst, f"{loss.planning:.2f}", f"{loss.groups:.2f}"]), flush=True
        )


def ablate(variants: Sequence[Variant], together: bool, names: Sequence[str]) -> int:
    """Print a row for each variant, or one for all of them and then their tables. `names`: of the tables that count."""
    head = [
        "variant",
        "makespan, mean of the worst table",
        "of the worst row",
        "planning time, by table",
        "new groups, most",
    ]
    print(line(head) + "\n" + "|---" * len(head) + "|", flush=True)
    lists = [list(variants)] if together else [[variant] for variant in variants]
    numbers = [number for number, row in enumerate(rows()) if row.table in names]
    tables = [rows()[number] for number in numbers]
    for begin in range(0, len(lists), AT_ONCE):
        now = lists[begin : begin + AT_ONCE]
        with planners(ROOT, now) as found:
            before, *after = measured(found, numbers, 1)
        for chosen, figures in zip(now, after):
            by_table = losses(tables, before, figures)
            print(worth(" + ".join(variant.name for variant in chosen), by_table), flush=True)
            if together:
                print_tables(by_table)
    return 0


def beside(checkout: Path) -> int:
    """Print this checkout's tables over another's, and the rows that got worse."""
    tables = rows()
    with planners(checkout, []) as [old], planners(ROOT, []) as [new]:
        before, after = measured([old, new], range(len(tables)), 3)
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


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="VARIANT",
        help="all if none is named: " + "; ".join(variant.name for variant in VARIANTS).replace("%", "%%"),
    )
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--table", action="append", choices=list(dict.fromkeys(row.table for row in rows())))
    parser.add_argument("--beside", type=Path, metavar="FOLDER")
    options = parser.parse_args(words)
    if options.beside and options.table:
        parser.error("--table: not with --beside")
    known = {variant.name: variant for variant in VARIANTS}
    unknown = [name for name in options.variants if name not in known]
    if unknown:
        parser.error(f"{unknown[0]}: no such variant; allowed: {'; '.join(known)}")
    try:
        return (
            beside(options.beside.resolve())
            if options.beside
            else ablate([known[name] for name in options.variants] or VARIANTS, options.together,
                        options.table or [row.table for row in rows()])
        )
    except VariantError as error:
        print(f"ablation.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
