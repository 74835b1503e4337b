"""A worker that something outside slows down."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.integration.faults import Run, Start, end, expected_ledger
from tests.integration.jobs import lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.alone
def test_a_worker_slowed_from_outside_gets_less_until_it_is_well_again(start: Start) -> None:
    """It runs a third of the time. Two workers, so that nobody's share of the machine's cores is taken by a third.

    Batches are so large that a step is longer than planning beside two busy workers takes on two cores.
    """
    run = start("cluster.num_workers=2", "batch.global_samples=72", "planner.tokens_per_rank=4096",
                "elastic.evict_below=0")
    run.wait_for_step(6)
    begun = run.step
    with slowed(run.pids[1]):
        run.wait_for_step(begun + 9, timeout_s=240)
    ended = run.step
    run.wait_for_step(ended + 14, timeout_s=240)
    end(run)
    speeds = {step: planned_speeds(run, step) for step in range(begun, ended + 13)}
    print(begun, ended, speeds)
    settled = range(begun + 5, ended)
    assert all(0.2 <= speeds[step][1] <= 0.45 for step in settled)
    gaps = [plan(run, step)["predicted_time_s"] / plan(run, step)["lower_bound_s"] - 1 for step in settled]
    print(gaps)
    assert max(gaps) < 0.05
    assert all(speeds[step][0] == 1.0 for step in settled)
    assert speeds[ended + 10] == (1.0, 1.0)
    assert run.events("slow")
    assert run.events("no_longer_slow")
    assert not run.events("worker_lost")
    # planning with unequal speeds takes longer, and still comes in time
    assert [line["step"] for line in lines(run.folder, "metrics.jsonl") if line["late"]] == []


def test_a_worker_far_too_slow_is_replaced_once(start: Start) -> None:
    """Its successor, which is as slow, is kept: where it runs must be what is slow, and a third one would be no faster.
    """
    run = start("cluster.num_workers=2", "batch.global_samples=24", "planner.tokens_per_rank=4096",
                "elastic.evict_below=0.6")
    run.wait_for_step(6)
    moment, victim = time.time(), run.pids[1]
    with slowed(victim):
        lost = run.wait_for_event(moment, "worker_lost")
    assert (lost["condition"], lost["pid"]) == ("slow", victim)
    run.wait_for(lambda: len(run.pids) == 1)
    run.wait_for_ranks(2)
    moment = time.time()
    with slowed(run.pids[1]):
        run.wait_for_event(moment, "slow")
        run.wait_for_step(run.step + 4)
    end(run)
    assert len(run.events("worker_lost")) == 1
    assert not run.events("broken")
    assert run.ledger == expected_ledger(run.folder, run.step)


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """The process runs a third of the time."""
    slow = threading.Event()
    slow.set()

    def duty_cycle() -> None:
        with suppress(ProcessLookupError):
            while slow.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.1)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.05)

    cycle = threading.Thread(target=duty_cycle)
    cycle.start()
    try:
        yield
    finally:
        slow.clear()
        cycle.join()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def planned_speeds(run: Run, step: int) -> tuple[float, ...]:
    """What the plan of a step took the ranks' speeds to be; all nominal where it names none."""
    found = plan(run, step)["inputs"]["speeds"]
    return tuple(found) if found else (1.0,) * len(run.pids)


def plan(run: Run, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / f"plans/step_{step:06d}.json").read_text())
    return found
