"""The tests that are marked `gpu`, but for those over real NCCL: part `nccl` runs them."""

from __future__ import annotations

from benchmarks.device_parts.outcomes import ROOT, run_tests
from benchmarks.device_parts.record import NotRun, Record
from benchmarks.device_parts.settings import Settings

MARKS = ("mark.gpu", "@rule(")
"""What stands in a file that has such tests; others are not imported, and may need more than the core does."""


def run(settings: Settings, record: Record) -> str:
    if settings.device != "cuda":
        raise NotRun("no CUDA device")
    files = [file for folder in ("model", "comm", "train") for file in sorted((ROOT / "tests" / folder).rglob("*.py"))]
    marked = [str(file) for file in files if any(mark in file.read_text() for mark in MARKS)]
    return run_tests(record, ["-m", "gpu", "-k", "not nccl", *marked])
