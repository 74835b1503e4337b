"""Runs tests of this checkout with pytest and writes down what came of each as it ends."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.device_parts.record import CheckError, NotRun, Record

ROOT = Path(__file__).resolve().parent.parent.parent


def run_tests(record: Record, arguments: list[str]) -> str:
    """Run what pytest's `arguments` select, one row a test; how many passed, in words.

    Raises:
        NotRun: pytest is not installed, or every test was skipped.
        CheckError: a test failed, or none was found.
    """
    if importlib.util.find_spec("pytest") is None:
        raise NotRun("pytest is not installed beside torch")
    import pytest

    outcomes = Outcomes(record)
    always = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--rootdir", str(ROOT)]
    status = pytest.main([*always, *arguments], plugins=[outcomes])
    counts = outcomes.counts
    if counts["failed"]:
        raise CheckError(f"{counts['failed']} of {counts.total()} tests failed, the first is {outcomes.first_failed}")
    if not counts:
        raise CheckError(f"pytest {' '.join(arguments)} ran no test (exit status {int(status)})")
    if counts["skipped"] == counts.total():
        raise NotRun(f"all {counts.total()} tests skipped themselves: {outcomes.first_reason}")
    return f"{counts['passed']} tests passed, {counts['skipped']} skipped"


class Outcomes:
    """A plugin of pytest: passed, skipped (and why) or failed, by test."""

    def __init__(self, record: Record) -> None:
        self.counts: Counter[str] = Counter()
        self.first_failed = self.first_reason = ""
        self._record, self._rules = record, dict[str, str]()
        record.table(["test", "", "s"])

    def pytest_itemcollected(self, item: Any) -> None:
        rule = getattr(getattr(item, "function", None), "rule", "")
        if isinstance(rule, str) and rule:
            self._rules[item.nodeid] = rule

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed or (report.skipped and report.nodeid.endswith(".py")):  # a whole file
            self._count(report, 0.0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.skipped or report.failed:
            self._count(report, report.duration)

    def _count(self, report: Any, seconds: float) -> None:
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            self.first_reason = self.first_reason or reason
        if report.failed:
            self.first_failed = self.first_failed or report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)  # of a test; of a file its last line says most
            reason = crash.message if crash else str(report.longrepr or "").strip().rpartition("\n")[2]
        reason = reason.strip().split("\n")[0][:160]
        self.counts[report.outcome] += 1
        what = f"{report.outcome}{': ' * bool(reason)}{reason}"
        name = report.nodeid.removeprefix("tests/")
        self._record.row(report.nodeid, {"outcome": report.outcome, "reason": reason, "seconds": seconds,
                                         "rule": self._rules.get(report.nodeid, "")},
                         [name, what, f"{seconds:.1f}"])
