"""A worker that something outside slows down."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from tests.integration.faults import Run, Start, end

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def test_a_worker_slowed_from_outside_gets_less_until_it_is_well_again(start: Start) -> None:
    """It runs a third of the time. Two workers, so that nobody's share of the machine's cores is taken by a third."""
    run = start("cluster.num_workers=2", "batch.global_samples=18", "elastic.evict_below=0")
    run.wait_for_step(6)
    victim, slow = run.pids[1], threading.Event()
    slow.set()

    def duty_cycle() -> None:
        while slow.is_set():
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(victim, signal.SIGCONT)
            time.sleep(0.05)

    begun = run.step
    cycle = threading.Thread(target=duty_cycle)
    cycle.start()
    try:
        run.wait_for_step(begun + 9, timeout_s=240)
    finally:
        slow.clear()
        cycle.join()
        os.kill(victim, signal.SIGCONT)
    ended = run.step
    run.wait_for_step(ended + 14, timeout_s=240)
    end(run)
    speeds = {step: planned_speeds(run, step) for step in range(begun, ended + 13)}
    print(begun, ended, speeds)
    assert min(speeds[step][1] for step in range(begun + 1, begun + 8)) < 0.6  # a plan is made a step ahead
    assert all(speeds[step][0] == 1.0 for step in range(begun + 5, ended))
    assert speeds[ended + 12] == (1.0, 1.0)
    assert run.events("slow")
    assert run.events("no_longer_slow")
    assert not run.events("worker_lost")


def planned_speeds(run: Run, step: int) -> tuple[float, ...]:
    """What the plan of a step took the ranks' speeds to be; all nominal where it names none."""
    found = json.loads((run.folder / f"plans/step_{step:06d}.json").read_text())["inputs"]["speeds"]
    return tuple(found) if found else (1.0,) * len(run.pids)
