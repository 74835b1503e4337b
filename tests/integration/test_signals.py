"""Ctrl-C, SIGTERM and SIGHUP, whatever the run is at: it ends within seconds, what is committed is saved, and no
committed step runs again.

All reach the whole group of the run's process: as from a terminal, from `timeout`, or when the terminal is closed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.storage import Folder
from tests.integration.faults import Run, Start, descendants, expected_ledger, kill, seconds_since
from tests.integration.jobs import lines

LIMIT_S = 15.0 if "PYTEST_XDIST_WORKER" in os.environ else 5.0
"""From the signal to the end of the process, beyond the step and the save under way. More is allowed where other tests
keep the machine busy.
"""

MOMENTS = 4
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
both_signals = pytest.mark.parametrize("name", ["Ctrl-C", "SIGTERM"])


def stop(run: Run, name: str) -> None:
    """Send the signal and see that the run ends as it ought to."""
    steps, moment = run.step, time.time()
    os.killpg(run.process.pid, SIGNALS[name])
    assert run.wait(90) == 1, run.said()
    ended_s = time.time() - moment
    under_way_s = step_and_save_s(run, steps, moment)
    print(f"{name} at step {steps}: ended after {ended_s:.2f} s, {under_way_s:.2f} s of them for the step and the save")
    (line,) = [line for line in run.errors.read_text().splitlines() if line.strip()]
    assert line.startswith("error: stopped ")
    assert f": {name}; " in f"{line}; "
    assert ended_s - under_way_s <= LIMIT_S, run.said()
    if "before the first step" in line:  # of this process: it has not looked yet at what the folder holds
        assert run.step == steps, run.said()
    else:
        assert f"the newest checkpoint is step {run.step}" in line or not run.step, run.said()
    assert run.step in (steps, steps + 1, steps + 2)  # the file is read a little before the signal is heard


def wait_until_ready(run: Run) -> None:
    """Return when it begins to read its first batch."""
    run.wait_for(lambda: "new run in" in run.output.read_text())


def step_and_save_s(run: Run, steps: int, moment: float) -> float:
    """Seconds after the signal that the last step took if it was committed after it, and from there to its checkpoint.
    """
    saved = [event for event in run.events_after(moment, "checkpoint") if event["step"] == run.step]
    step_s = lines(run.folder, "metrics.jsonl")[-1]["step_time_s"] if run.step > steps else 0.0
    committed_s = max(0.0, (run.folder / "ledger.jsonl").stat().st_mtime - moment) if run.step > steps else 0.0
    return float(step_s + (seconds_since(saved[-1], moment) - committed_s if saved else 0.0))


def goes_on(run: Run, begin: Callable[[], Run], steps: int) -> Run:
    """Start the same command again: it goes on with the step after the last committed one."""
    again = begin()
    again.wait_for_step(steps + 1)
    assert f"resuming after step {steps}" in again.output.read_text()
    return again


@pytest.fixture
def unread(tmp_path: Path) -> list[str]:
    """Data of which no batch is there within a minute: each row is a million tokens."""
    rows = [{"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "word " * 200_000}]}
            for _ in range(40)]
    (tmp_path / "long.json").write_text(json.dumps(rows))
    return ["data=llava", f"data.path={tmp_path / 'long.json'}"]


@pytest.mark.slow
def test_ctrl_c_amid_training(start: Start) -> None:
    run = start("cluster.num_workers=2")
    run.wait_for_step(3)
    stop(run, "Ctrl-C")
    assert run.ledger == expected_ledger(run.folder, run.step)


@pytest.mark.slow
def test_sigterm_while_the_first_batch_is_read(start: Start, unread: list[str]) -> None:
    run = start("cluster.num_workers=2", *unread)
    wait_until_ready(run)
    stop(run, "SIGTERM")
    assert run.step == 0


@pytest.fixture(scope="module")
def start_s(ray_cluster: None, common: list[str], tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long a run takes to be ready for its first step."""
    begun = time.monotonic()
    run = Run(tmp_path_factory.mktemp("start") / "run", *common, "cluster.num_workers=2", "run.steps=2000")
    wait_until_ready(run)
    run.end()
    return time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.timeout(900)
@both_signals
def test_while_it_starts(start: Start, start_s: float, name: str) -> None:
    moments = random.Random(f"starting {name}")
    for _ in range(MOMENTS):
        run = start("cluster.num_workers=2")
        time.sleep(moments.uniform(0.2, start_s))  # Python itself takes a moment before it can hear anything
        stop(run, name)
        run.output.unlink()


@pytest.mark.slow
@pytest.mark.timeout(900)
@both_signals
def test_while_it_compiles_and_reads(start: Start, unread: list[str], name: str) -> None:
    moments = random.Random(f"reading {name}")
    for _ in range(MOMENTS):
        run = start("cluster.num_workers=2", *unread)
        wait_until_ready(run)
        time.sleep(moments.uniform(0.0, 3.0))
        stop(run, name)
        run.output.unlink()


def disturb_training(run: Run, pause_s: float) -> None:
    run.wait_for_step(run.step + 2)
    time.sleep(pause_s)


def disturb_saving(run: Run, pause_s: float) -> None:
    run.wait_for_step(run.step + 2)
    run.wait_for(lambda: any("manifest.json" not in os.listdir(folder)
                             for folder in (run.folder / "checkpoints").iterdir()))
    time.sleep(pause_s / 5)


def disturb_recovering(run: Run, pause_s: float) -> None:
    run.wait_for_step(run.step + 2)
    kill(run.pids[1])
    time.sleep(2 * pause_s)


PHASES = {disturb_training: [], disturb_saving: ["model.preset=small", "checkpoint.every_steps=1"],
          disturb_recovering: []}


@pytest.mark.slow
@pytest.mark.timeout(900)
@both_signals
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__.removeprefix("disturb_"))
def test_amid_steps(start: Start, phase: Callable[[Run, float], None], name: str) -> None:
    moments = random.Random(f"{phase.__name__} {name}")

    def begin() -> Run:
        return start(*PHASES[phase])

    run = begin()
    for _ in range(MOMENTS):
        phase(run, moments.uniform(0.0, 1.0))
        stop(run, name)
        assert run.ledger == expected_ledger(run.folder, run.step)
        run = goes_on(run, begin, run.step)
    stop(run, name)
    assert run.ledger == expected_ledger(run.folder, run.step)


def goes_on_from(run: Run) -> int:
    """The step of its newest checkpoint."""
    return Checkpoints(Folder(str(run.folder)), 1).newest_step()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs start a cluster of their own."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SIGNALS)
def test_a_run_with_a_cluster_of_its_own(start: Start, alone: None, name: str) -> None:
    """Ray's processes are started by the run, and end with it."""
    run = start("cluster.num_workers=2")
    run.wait_for_step(3, 300.0)
    started = descendants(run.process.pid) - {run.process.pid}
    assert len(started) > 5
    stop(run, name)
    assert run.step == goes_on_from(run)
    assert run.ledger == expected_ledger(run.folder, run.step)
    deadline = time.monotonic() + 2.0  # they were killed; on a busy machine the last of them take a moment to go
    while left := [process for process in started if Path(f"/proc/{process}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    again = start("cluster.num_workers=2")
    time.sleep(random.Random(f"alone {name}").uniform(1.0, 8.0))
    stop(again, name)
