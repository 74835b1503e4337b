from __future__ import annotations

import time

import pytest

from dhp_ray.runtime.messages import Notice
from dhp_ray.runtime.waits import LongWait, Waits, said_at_s


def test_a_wait_is_said_at_growing_intervals() -> None:
    assert [said_at_s(said) for said in range(9)] == [10, 30, 60, 120, 300, 600, 1200, 1800, 2400]
    assert [said_at_s(said, 30.0) for said in range(3)] == [30, 90, 180]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_due_is_said_once_and_long_waits_are_kept_with_their_length() -> None:
    clock = Clock()
    waits = Waits(clock=clock)
    assert waits.due() is None
    with waits.on("the batch of step 1"):
        clock.now = 9.9
        assert waits.due() is None
        clock.now = 10.0
        assert waits.due() == Notice("waiting for the batch of step 1: 10 s so far")
        assert waits.due() is None
        clock.now = 34.16
        assert waits.due() == Notice("waiting for the batch of step 1: 34 s so far")
    assert waits.due() is None
    with waits.on("the plan of step 1"):
        clock.now += 9.0
    assert waits.taken() == [LongWait("the batch of step 1", 34.2)]
    assert waits.taken() == []


def test_the_innermost_wait_is_said() -> None:
    clock = Clock()
    waits = Waits(clock=clock)
    with waits.on("new workers"):
        with waits.on("the workers to leave generation 1"):
            clock.now = 10.0
            assert waits.due() == Notice("waiting for the workers to leave generation 1: 10 s so far")
        assert waits.due() == Notice("waiting for new workers: 10 s so far")


def test_what_shows_itself_is_kept_and_not_said() -> None:
    clock = Clock()
    waits = Waits(clock=clock)
    with waits.on("the index of the data", shows_itself=True):
        clock.now = 100.0
        assert waits.due() is None
    assert waits.taken() == [LongWait("the index of the data", 100.0)]


def test_long_waits_are_written_where_they_are_kept_those_from_before_too() -> None:
    clock, written = Clock(), []
    waits = Waits(clock=clock)
    with waits.on("the workers to start"):
        clock.now += 12.0
    waits.add([LongWait("room for 2 workers", 11.0)])  # of another process
    waits.keep(written.append)
    assert written == [LongWait("the workers to start", 12.0), LongWait("room for 2 workers", 11.0)]

    def lost() -> None:
        with waits.on("the checkpoint of step 4"):
            clock.now += 10.0
            raise ValueError("rank 1 died")

    with pytest.raises(ValueError, match="rank 1 died"):
        lost()
    assert written[2:] == [LongWait("the checkpoint of step 4", 10.0)]


def test_a_wait_is_said_while_the_thread_that_waits_is_blocked() -> None:
    said: list[str] = []
    waits = Waits(lambda notice: said.append(notice.text), look_s=0.01)
    with waits.on("the checkpoint of step 4", long_s=0.1):
        deadline = time.monotonic() + 20.0
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    waits.close()
    assert said[0] == "waiting for the checkpoint of step 4: 0 s so far"
    assert said[-1].endswith(" s for the checkpoint of step 4")
