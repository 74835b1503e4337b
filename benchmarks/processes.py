"""What processes use and hold: CPU seconds by kind of a run's processes, Ray's own among them, so far; and what one
process holds open. Linux only: /proc is read.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
KINDS = {"ray::Driver": "driver", "ray::Worker": "workers", "ray::IDLE": "other tasks",
         "jobs/train.py": "job's process", "gcs_server": "Ray's GCS",
         "raylet/raylet": "Ray's raylet", "dashboard": "Ray's dashboard and agents",
         "/agent": "Ray's dashboard and agents", "log_monitor": "Ray's log monitor",
         "monitor.py": "Ray's autoscaler monitor", "ray::": "other tasks", "default_worker.py": "starting workers"}
"""What a command line holds, first match, and what the process is then called."""

Used = dict[tuple[int, str], float]
"""{(pid, kind): CPU seconds}"""


def used(root: int) -> Used:
    """Of a process and all that descend from it."""
    children: dict[int, list[int]] = defaultdict(list)
    found: dict[int, tuple[str, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended
            children[int(stat[1])].append(int(entry.name))
            found[int(entry.name)] = (kind_of(command), (int(stat[11]) + int(stat[12])) / TICKS)
    of_run, waiting = {}, [root]
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        if pid in found:
            of_run[pid, found[pid][0]] = found[pid][1]
    return of_run


def kind_of(command: str) -> str:
    return next((kind for mark, kind in KINDS.items() if mark in command), re.sub(r"\s.*", "", command) or "?")


def between(before: Used, after: Used) -> dict[str, float]:
    """CPU seconds by kind of process from one moment to another; a process counts as what it is at the end."""
    begun = {pid: seconds for (pid, _), seconds in before.items()}
    total: dict[str, float] = defaultdict(float)
    for (pid, kind), seconds in after.items():
        total[kind] += seconds - begun.get(pid, 0.0)
    return dict(total)


def table(seconds: dict[str, float], steps: int) -> str:
    """Milliseconds of CPU a step, most first."""
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    return "\n".join(["| CPU ms a step | |", "|---|---|",
                      *(f"| {kind} | {1e3 * used_s / steps:.0f} |" for kind, used_s in rows)])


class Held(NamedTuple):
    """What a process holds: `memory_mb` is its own."""

    descriptors: int
    threads: int
    memory_mb: float

    def __str__(self) -> str:
        return (f"{self.descriptors} file descriptors, {self.threads} threads, {self.memory_mb:.0f} MB")


def held_by(pid: int) -> Held:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Held(len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["RssAnon"].split()[0]) / 1024)
