"""A run that calls its ranks through relays: workers and relays are killed, and it goes on as an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from dhp_ray.runtime.driver import session
from tests.integration.faults import Start, check, children, end, kill, lose_a_worker, seconds_since
from tests.integration.jobs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]


def use_small_relays() -> None:
    """Ray calls this in every worker process of the job, the driver's too."""
    session.RANKS_PER_RELAY = 2


def test_a_worker_a_relay_and_the_driver_killed_and_a_worker_stopped(
    start: Start, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = {"worker_process_setup_hook": "tests.integration.test_relays.use_small_relays",
               "env_vars": {"PYTHONPATH": str(ROOT)}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": runtime}))
    run = start()
    run.wait_for_step(3)
    assert len(children("Relay")) == 2
    lose_a_worker(run)

    run.wait_for_ranks(3)
    workers = run.pids
    moment = kill(children("Relay")[0])
    broken = run.wait_for_event(moment, "broken")
    assert broken["cause"] in ("the relay of ranks 0 to 0 died", "the relay of ranks 1 to 2 died")
    formed = run.wait_for_event(moment, "generation")
    assert (formed["survivors"], run.events_after(moment, "worker_lost")) == (3, [])
    assert run.pids == workers

    run.wait_for_step(run.step + 2)
    stopped = run.pids[-1]
    os.kill(stopped, signal.SIGSTOP)
    moment = time.time()
    assert seconds_since(run.wait_for_event(moment, "broken", timeout_s=60), moment) < 10 + 5
    run.wait_for_event(moment, "generation", timeout_s=60)
    assert {event["pid"]: event["condition"]
            for event in run.events_after(moment, "worker_lost")} == {stopped: "unresponsive"}

    run.wait_for_ranks(3)
    (driver,) = children("Driver")
    moment = kill(driver)
    assert run.wait_for_event(moment, "generation")["cause"] == "the driver was lost"
    run.wait_for_step(run.step + 2)
    assert len(children("Relay")) == 2  # those of generations before have ended
    end(run)
    check(run, undisturbed)
    deadline = time.monotonic() + 20
    while children("Relay") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children("Relay") == []
