"""Runs the entry points as a user does: a process of its own, against the test session's Ray cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIRST_STEPS = 9
"""Of the default run, that conftest.py makes."""


@dataclass
class Ended:
    status: int
    output: str
    errors: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.strip()]


@dataclass(frozen=True)
class FirstRun:
    """A run that has ended, the arguments of its command without the folder, and its held-out samples."""

    folder: Path
    ended: Ended
    arguments: list[str]
    held_out: Path


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "jobs" / name), *arguments]


def start(name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(name, *arguments), cwd=ROOT, env=os.environ | environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(name: str, *arguments: str, timeout_s: float = 240.0, **environment: str) -> Ended:
    done = subprocess.run(command(name, *arguments), cwd=ROOT, env=os.environ | environment, text=True,
                          capture_output=True, timeout=timeout_s)
    return Ended(done.returncode, done.stdout, done.stderr)


def train(run_dir: Path, *arguments: str, timeout_s: float = 240.0) -> Ended:
    """A run that must succeed."""
    ended = run("train.py", f"run.dir={run_dir}", *arguments, timeout_s=timeout_s)
    assert ended.status == 0, ended.output + ended.errors
    return ended


def refused(status: int, *arguments: str) -> str:
    """The one line that a run ends with that must fail."""
    ended = run("train.py", *arguments)
    assert ended.status == status, ended.output + ended.errors
    said = [line for line in ended.error_lines if line.startswith("error: ")]
    assert len(said) == 1, ended.errors
    assert "Traceback" not in ended.output + ended.errors, ended.output + ended.errors
    return said[0]


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    path = run_dir / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in lines(run_dir, "metrics.jsonl")]


def ledger(run_dir: Path) -> list[list[str]]:
    return [line["sample_ids"] for line in lines(run_dir, "ledger.jsonl")]
