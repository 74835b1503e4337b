"""Faults where nothing raises: over the asynchronous backend a survivor waits until its groups are aborted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.async_backend.ray_workers import environment
from tests.integration.faults import Run, Start, check, end, kill, seconds_since
from tests.integration.test_soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

SEEN_S, SILENT_S, FORMED_S = 2.0, 10.0, 2.0
"""After the deed a death and a stop are seen; after that the next group stands."""
MIRRORED = "elastic.mirror_every_steps=1"
"""No step is lost with a rank; by default copies may be some steps old."""
BUSY = 2.0
"""To form a group takes so many times as long on a machine whose cores four ranks share."""


@pytest.fixture(autouse=True)
def asynchronous(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the pids of all ranks that run over the backend; the reference was made over gloo before."""
    (pids := tmp_path / "pids").mkdir()
    for name, value in environment(pids).items():
        monkeypatch.setenv(name, value)
    return pids


def survived(run: Run, moment: float, lost: list[int], condition: str, seen_s: float) -> None:
    """What follows a fault: seen in time, the others keep process and state, the next group stands soon."""
    formed = run.wait_for_event(moment, "generation", timeout_s=60)
    (broken, *_) = run.events_after(moment, "broken")
    assert seconds_since(broken, moment) < seen_s
    assert {event["pid"]: event["condition"] for event in run.events_after(moment, "worker_lost")} == dict.fromkeys(
        lost, condition)
    assert formed["version"] is not None, "the state of the survivors' memory, no checkpoint"
    assert not run.events_after(moment, "rollback")
    assert formed["seconds"] < BUSY * FORMED_S, formed


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_ranks_killed_and_stopped(
    start: Start, undisturbed: list[float], asynchronous: Path, sync: str
) -> None:
    run = start("cluster.num_workers=4", f"planner.sync={sync}", MIRRORED)
    run.wait_for_step(4)
    workers = run.pids
    assert set(map(str, workers)) <= set(os.listdir(asynchronous))
    moment = kill(workers[1])
    survived(run, moment, [workers[1]], "dead", SEEN_S)
    assert set(run.pids) >= set(workers) - {workers[1]}

    run.wait_for_ranks(4)
    workers = run.pids
    os.kill(workers[2], signal.SIGSTOP)
    moment = time.time()
    survived(run, moment, [workers[2]], "unresponsive", SILENT_S)
    assert set(run.pids) >= set(workers) - {workers[2]}

    run.wait_for_ranks(4)
    end(run)
    check(run, undisturbed)


def test_half_of_the_ranks_killed(start: Start, undisturbed: list[float]) -> None:
    """Two of which neither holds the other's replica."""
    run = start("cluster.num_workers=4", MIRRORED)
    run.wait_for_step(4)
    workers = run.pids
    moment = kill(workers[0], workers[2])
    survived(run, moment, [workers[0], workers[2]], "dead", SEEN_S)
    assert set(run.pids) >= {workers[1], workers[3]}
    run.wait_for_ranks(4)
    end(run)
    check(run, undisturbed)


@pytest.mark.timeout(1200)
def test_a_soak_of_six(reference: Path, tmp_path: Path, asynchronous: Path) -> None:
    soak(reference, tmp_path, "step", 6, 2)
    assert len(os.listdir(asynchronous)) >= 4
