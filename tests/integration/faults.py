"""A run under way, for those who do things to it: what it has written so far, and its processes by what they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from dhp_ray.config import load
from dhp_ray.data.stream import Stream
from tests.integration.jobs import ROOT, command, ledger, lines, losses

NOTHING = subprocess.DEVNULL

COMPARED = 24
"""First steps whose losses are compared with those of an undisturbed run. Far beyond, rounding alone makes runs on
other numbers of ranks differ.
"""


class Run:
    """`jobs/train.py` in a process of its own, against the cluster that RAY_ADDRESS names. What it prints goes to files
    beside `folder`.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder, self.arguments = folder, arguments
        self.output = folder.with_suffix(".out")
        self.errors = folder.with_suffix(".err")
        with self.output.open("a") as out, self.errors.open("w") as err:
            self.process = subprocess.Popen(command("train.py", f"run.dir={folder}", *arguments), cwd=ROOT,
                                            stdin=NOTHING, stdout=out, stderr=err,
                                            start_new_session=True)  # a group of its own, as a shell gives each job

    @property
    def step(self) -> int:
        """Committed steps."""
        path = self.folder / "ledger.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def ledger(self) -> list[list[str]]:
        return ledger(self.folder)

    @property
    def losses(self) -> list[float]:
        return losses(self.folder)

    @property
    def generations(self) -> list[int]:
        """The generation that committed each step."""
        return [line["generation"] for line in lines(self.folder, "metrics.jsonl")]

    @property
    def pids(self) -> list[int]:
        """The ranks' processes, in rank order."""
        return [rank["pid"] for rank in self.cluster["ranks"]]

    @property
    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "cluster.json").read_text())
        return found

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        return [event for event in lines(self.folder, "events.jsonl") if kind in ("", event["kind"])]

    def wait_for(self, what: Callable[[], object], timeout_s: float = 120.0) -> None:
        """Return once `what` is true; the run must not end before."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s, at step {self.step}\n{self.said()}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> None:
        self.wait_for(lambda: self.step >= step, timeout_s)

    def wait_for_event(self, after: float, *kinds: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """The first event of these kinds after a moment (seconds since the epoch)."""
        self.wait_for(lambda: self.events_after(after, *kinds), timeout_s)
        return self.events_after(after, *kinds)[0]

    def events_after(self, moment: float, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["kind"] in kinds and seconds_since(event, moment) > 0]

    def wait_for_ranks(self, number: int, timeout_s: float = 120.0) -> None:
        """Return once a generation of so many ranks has committed a step."""
        self.wait_for(lambda: len(self.pids) == number, timeout_s)
        self.wait_for_step(self.step + 1, timeout_s)

    def wait(self, timeout_s: float = 120.0) -> int:
        """The exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end within {timeout_s:g} s, at step {self.step}\n{self.said()}") from None

    def error_lines(self) -> list[str]:
        return [line for line in self.errors.read_text().splitlines() if line.startswith("error: ")]

    def said(self) -> str:
        events = "\n".join(str(event) for event in self.events()[-12:])
        return f"{self.output.read_text()[-1500:]}\n{self.errors.read_text()[-1500:]}\n{events}"

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


Start = Callable[..., Run]


def children(role: str) -> list[int]:
    """Processes of actors of class `role` on a cluster that this process has started."""
    table = _processes()
    return sorted(pid for pid in descendants(os.getpid()) if pid in table and table[pid][1].startswith(f"ray::{role}"))


def call_of(pid: int) -> str:
    """The method that the process of an actor runs; empty where it runs none. Ray names it in the process's title, and
    of several threads the one that has begun or ended a call last.
    """
    return _processes().get(pid, (0, ""))[1].partition("\0")[0].strip().rpartition(".")[2].rstrip("()")


def descendants(pid: int) -> set[int]:
    """A process with all below it."""
    table, family = _processes(), {pid}
    while more := {child for child, (parent, _) in table.items() if parent in family} - family:
        family |= more
    return family


def _processes() -> dict[int, tuple[int, str]]:
    """Parent and title of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found[int(entry.name)] = parent, (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
    return found


def kill(*pids: int) -> float:
    """SIGKILL those that are there; when (seconds since the epoch)."""
    moment = time.time()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return moment


def lose_a_worker(run: Run) -> None:
    """Kill the first rank of three: it is seen at once, and the other two go on in the same processes."""
    victim, *survivors = run.pids
    moment = kill(victim)
    formed = run.wait_for_event(moment, "generation")
    (lost,) = run.events_after(moment, "worker_lost")
    assert (lost["condition"], lost["pid"], formed["survivors"]) == ("dead", victim, 2)
    assert set(survivors) <= set(run.pids)
    assert seconds_since(run.events_after(moment, "broken")[0], moment) < 3


def seconds_since(event: dict[str, Any], moment: float) -> float:
    return datetime.fromisoformat(event["time"]).timestamp() - moment


def expected_ledger(run_dir: Path, num_steps: int) -> list[list[str]]:
    """The samples of the first steps of a run, from its configuration and the data alone. Ray must be initialised."""
    config = load(["--config", str(run_dir / "config.yaml")])
    stream = Stream(config.data, config.model, config.seed)
    stream.limit(config.planner.max_sequence_tokens)
    found: list[list[str]] = []
    while len(found) < num_steps:
        batch = stream.next_batch(config.batch.global_samples)
        if batch is None:
            stream.start_epoch(stream.epoch + 1)
        else:
            found.append([sample.id for sample in batch.samples])
    stream.close()
    return found


def end(run: Run) -> None:
    """SIGTERM: the step under way is finished, the state saved, one line says how to go on."""
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(90) == 1, run.said()
    (line,) = run.error_lines()
    assert (
        f"stopped after step {run.step}: SIGTERM; the newest checkpoint is step {run.step}: start the same command "
        "again"
        in line
    )
    assert "Traceback" not in run.errors.read_text()
    assert run.generations == sorted(run.generations)


def check(run: Run, undisturbed: list[float]) -> None:
    """Every committed step has its samples, each once; the losses are those of a run that nothing happened to."""
    assert run.ledger == expected_ledger(run.folder, run.step)
    assert len(run.losses) == run.step
    apart = [abs(mine - calm) / abs(calm) for mine, calm in zip(run.losses[:COMPARED], undisturbed)]
    assert max(apart) < 1e-4, apart
