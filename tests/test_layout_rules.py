"""Rules of the repository that no single package can test."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

JOBS = sorted((ROOT / "jobs").glob("*.py"))
SOURCES = sorted(path for folder in ("dhp_ray", "jobs", "benchmarks", "tests")
                 for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_no_job_has_the_name_of_a_module(job: Path) -> None:
    """jobs/ is on sys.path while a job runs: a `profile.py` there breaks torch."""
    taken = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    assert job.stem not in taken


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_help_comes_at_once(job: Path) -> None:
    """Process time, so that a busy machine does not fail it; the best of three, so that cold file caches do not."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        finished = subprocess.run([sys.executable, str(job), "--help"], capture_output=True, text=True, timeout=60,
                                  check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.startswith("usage: ")
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if times[-1] < 1.0:
            return
    raise AssertionError(f"--help took {min(times):.2f} s of process time")


@pytest.mark.slow  # make test runs lint-imports before the tests
def test_imports_go_one_way() -> None:
    finished = subprocess.run([str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT,
                              capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout


def test_files_are_named_for_what_they_hold() -> None:
    vague = re.compile(r"utils?|helpers?|managers?|handlers?|common|misc")
    found = [str(path.relative_to(ROOT))
             for path in SOURCES if any(vague.fullmatch(word) for word in path.stem.split("_"))]
    assert found == []


def test_no_file_outgrows_itself() -> None:
    """Past 600 lines a file holds more than one idea."""
    found = {str(path.relative_to(ROOT)): lines
             for path in SOURCES if (lines := len(path.read_text().splitlines())) > 600}
    assert found == {}


def test_every_module_and_job_says_what_it_is() -> None:
    found = []
    for path in SOURCES:
        if (
            path.name != "__init__.py"
            and not path.is_relative_to(ROOT / "tests")
            and ast.get_docstring(ast.parse(path.read_text())) is None
        ):
            found.append(str(path.relative_to(ROOT)))
    assert found == []


def test_no_two_tests_have_one_name() -> None:
    """pytest imports test files by their name alone."""
    names = [path.name for path in SOURCES if path.is_relative_to(ROOT / "tests") and path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
