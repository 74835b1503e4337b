"""Two starts of one command: beside a run that goes on, after one that was killed, and after one that was paused."""

from __future__ import annotations

import os
import signal
import time

import pytest

from dhp_ray.runtime.records.lease import EXPIRES_S
from tests.integration.faults import Run, Start, end, expected_ledger, kill
from tests.integration.jobs import run as run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BUSY_S = 300.0
"""More than any wait takes, also beside other tests."""


def test_the_second_is_refused_and_the_first_goes_on(start: Start) -> None:
    run = start("cluster.num_workers=2")
    run.wait_for_step(3, BUSY_S)
    begun = time.monotonic()
    second = run_job("train.py", f"run.dir={run.folder}", *run.arguments)
    print(f"refused after {time.monotonic() - begun:.2f} s")
    assert (second.status, second.output) == (1, "")
    (line,) = second.error_lines
    assert line.startswith(f"error: run.dir: {run.folder} is in use by process {run.process.pid} on host ")
    run.wait_for_step(run.step + 3)
    end(run)
    assert run.ledger == expected_ledger(run.folder, run.step)


def test_a_killed_run_is_followed_at_once(start: Start) -> None:
    run = start("cluster.num_workers=2", "checkpoint.every_steps=2")
    run.wait_for_step(5, BUSY_S)
    kill(run.process.pid)
    again = start("cluster.num_workers=2", "checkpoint.every_steps=2")  # its driver and workers may still be there
    again.wait_for(lambda: "resuming after step" in again.output.read_text(), BUSY_S)
    again.wait_for_step(again.step + 4, BUSY_S)
    end(again)
    assert again.ledger == expected_ledger(again.folder, again.step)
    assert again.generations == sorted(again.generations)


def paused(run: Run) -> None:
    run.wait_for_step(3, BUSY_S)
    os.kill(run.process.pid, signal.SIGSTOP)
    time.sleep(EXPIRES_S + 1.0)


def test_a_paused_run_ends_once_another_has_taken_over(start: Start) -> None:
    """Its driver and its workers go on while its own process, which renews the lease, is paused."""
    run = start("cluster.num_workers=2")
    paused(run)
    mine = run.errors.rename(run.errors.with_suffix(".first"))
    again = start("cluster.num_workers=2")
    again.wait_for(lambda: list((again.folder / "lease").glob("000002_*")), BUSY_S)
    os.kill(run.process.pid, signal.SIGCONT)
    assert run.wait() == 1
    (line,) = [line for line in mine.read_text().splitlines() if line.startswith("error: ")]
    assert f"was taken over by process {again.process.pid} on host " in line
    again.wait_for_step(again.step + 3, BUSY_S)
    end(again)
    assert again.ledger == expected_ledger(again.folder, again.step)
