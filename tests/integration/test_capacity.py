"""Fewer workers than a run needs, more than it began with, and those that are still loading."""

from __future__ import annotations

import pytest

from tests.integration.faults import Start, check, children, end, kill

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def test_below_the_minimum_a_run_waits_for_capacity(start: Start, undisturbed: list[float]) -> None:
    run = start("cluster.min_workers=3")
    run.wait_for_step(3)
    survivors = run.pids[1:]
    moment = kill(run.pids[0])
    waiting = run.wait_for_event(moment, "waiting")
    assert (waiting["num_ranks"], waiting["have"]) == (3, 2)
    formed = run.wait_for_event(moment, "generation")
    assert (formed["survivors"], formed["newcomers"]) == (2, 1)
    assert set(survivors) <= set(run.pids)
    assert "2 workers are left, the run needs 3: waiting for capacity" in run.output.read_text()
    run.wait_for_step(formed["step"] + 1)
    end(run)
    check(run, undisturbed)


def test_a_run_that_waits_for_capacity_saves_what_is_held_when_it_is_to_end(
    start: Start, undisturbed: list[float]
) -> None:
    run = start("cluster.min_workers=3")
    run.wait_for_step(3)
    moment = kill(run.pids[0])
    run.wait_for_event(moment, "waiting")
    end(run)
    (formed,) = run.events("generation")
    assert (formed["survivors"], formed["newcomers"]) == (2, 0)
    check(run, undisturbed)


def test_a_run_grows_when_there_is_room_for_more(start: Start, undisturbed: list[float]) -> None:
    """Beyond cluster.num_workers, up to cluster.max_workers; one of those that came is then replaced like any other."""
    run = start("cluster.num_workers=2", "cluster.max_workers=3")
    run.wait_for(lambda: run.events("generation"))
    (grown,) = run.events("generation")
    assert len(run.pids) == 3
    assert (grown["cause"], grown["survivors"], grown["newcomers"]) == ("1 worker joins", 2, 1)
    first = set(run.pids)
    moment = kill(run.pids[2])
    run.wait_for_event(moment, "generation")
    run.wait_for_ranks(3)
    assert len(first & set(run.pids)) == 2
    end(run)
    check(run, undisturbed)


def test_a_worker_that_loads_when_the_driver_is_lost_joins_all_the_same(start: Start, undisturbed: list[float]) -> None:
    run = start()
    run.wait_for_step(3)
    before = children("Worker")
    victim, *survivors = run.pids
    moment = kill(victim)
    run.wait_for_event(moment, "generation")
    run.wait_for(lambda: set(children("Worker")) - set(before))
    (loading,) = set(children("Worker")) - set(before)
    moment = kill(*children("Driver"))
    run.wait_for_event(moment, "generation")
    run.wait_for_ranks(3)
    assert set(run.pids) == {*survivors, loading}
    end(run)
    check(run, undisturbed)


def test_a_worker_killed_with_the_driver_is_told(start: Start, undisturbed: list[float]) -> None:
    run = start()
    run.wait_for_step(3)
    victim, *survivors = run.pids
    moment = kill(victim, *children("Driver"))
    run.wait_for_event(moment, "generation")
    run.wait_for_ranks(3)
    assert [(event["rank"], event["pid"]) for event in run.events_after(moment, "worker_lost")] == [(0, victim)]
    assert set(survivors) < set(run.pids)
    end(run)
    check(run, undisturbed)
