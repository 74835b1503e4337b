"""Newcomers, as real actors: when they are ready, which are taken, what becomes of one that fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dhp_ray.runtime.driver.recovery import LONGEST_S, PendingWorkers
from dhp_ray.runtime.messages import Message, Notice, Replace

TOLD: SimpleQueue[Message] = SimpleQueue()


class Newcomer:
    """What PendingWorkers asks of a worker; `deed` is what becomes of it while it loads the model."""

    def __init__(self, deed: str, gate: str) -> None:
        self.deed, self.gate = deed, gate

    def describe(self, device: str, probe: str) -> dict[str, Any]:
        return {"pid": os.getpid(), "node_id": "a", "device": device, "probe": probe}

    def prepare(self) -> None:
        while not os.path.exists(self.gate):
            time.sleep(0.01)
        if self.deed == "raise":
            raise OSError("model/config.json: no such file\nand a second line")
        if self.deed == "die":
            os._exit(1)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Newcomers load their model until this file is there."""
    return tmp_path / "gate"


@pytest.fixture
def arrivals(ray_cluster: None, gate: Path) -> Iterator[Any]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the cluster's processes do not import tests
    actor = ray.remote(num_cpus=0)(Newcomer)
    actors = []

    def offered(*deeds: str) -> PendingWorkers:
        arrivals = PendingWorkers("cpu", TOLD.put)
        for slot, deed in enumerate(deeds):
            actors.append(actor.remote(deed, str(gate)))
            arrivals.offer(slot, actors[-1])
        return arrivals

    yield offered
    for newcomer in actors:
        ray.kill(newcomer)


def reported(arrivals: PendingWorkers, *told: Any) -> list[Message]:
    arrivals.report(*told)
    return [TOLD.get_nowait() for _ in range(TOLD.qsize())]


def wait_until(what: Any) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_newcomers_are_ready_once_they_have_loaded_and_are_taken_in_the_order_they_came(
    arrivals: Any, gate: Path
) -> None:
    found = arrivals("load", "load", "load")
    time.sleep(0.5)
    assert found.ready() == []
    assert found.take(3) == []
    gate.touch()
    wait_until(lambda: len(found.ready()) == 3)
    members = found.ready()
    assert [member.slot for member in members] == [0, 1, 2]
    assert len({member.described["pid"] for member in members}) == 3
    assert members[0].described["probe"] == "config.yaml"  # which the run has written: no probe of its own is needed
    assert found.take(2) == members[:2]
    assert found.ready() == members[2:]
    assert found.take(0) == []
    assert found.take(5) == members[2:]
    assert found.ready() == []
    assert not found.failed


def test_one_that_fails_leaves_its_slot_and_its_reason(arrivals: Any, gate: Path) -> None:
    found = arrivals("raise", "load", "die")
    gate.touch()
    wait_until(lambda: len(found.ready()) == 1 and len(found.failed) == 2)
    reasons = dict(found.failed)
    assert reasons[0] == "model/config.json: no such file"
    assert 2 in reasons
    assert "\n" not in reasons[2]
    assert {message.slot for message in reported(found) if isinstance(message, Replace)} == {0, 2}
    assert [member.slot for member in found.take(3)] == [1]
    found.failed += [(0, "again"), (1, "the one that joined has been lost")]
    assert [message for message in reported(found) if isinstance(message, Replace)] == [Replace(1)]


def until_it_fails(member: Any) -> None:
    """`ray.kill` returns before the process is gone: it may answer once more."""
    for _ in range(500):
        ray.get(member.actor.describe.remote("cpu", ""))
        time.sleep(0.02)


def test_one_that_dies_before_it_is_taken_is_noticed_by_its_next_call_not_by_arrivals(
    arrivals: Any, gate: Path
) -> None:
    found = arrivals("load")
    gate.touch()
    wait_until(found.ready)
    (member,) = found.take(1)
    ray.kill(member.actor)
    with pytest.raises(ray.exceptions.RayActorError):
        until_it_fails(member)


def test_the_places_of_those_that_fail_in_a_row_are_filled_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that cannot read the model would otherwise load it again and again, for weeks."""
    clock = [100.0]
    monkeypatch.setattr("dhp_ray.runtime.driver.recovery.monotonic", lambda: clock[0])
    found, told = PendingWorkers("cpu", TOLD.put), []
    for wait_s in (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, LONGEST_S, LONGEST_S):
        found.failed.append((3, "no such file"))
        records = SimpleNamespace(event=lambda kind, slot, error: told.append((slot, error)))
        [notice, *due] = reported(found, records)
        later = f" in {wait_s:g} s" if wait_s else ""
        assert notice == Notice(f"a new worker failed, another is asked for{later}: no such file")
        assert due == ([] if wait_s else [Replace(3)])
        clock[0] += wait_s - 0.1
        assert reported(found) == []
        clock[0] += 0.2
        assert reported(found) == ([Replace(3)] if wait_s else [])
    assert told == [(3, "no such file")] * 11


def test_one_that_loads_for_long_is_reported_with_its_place(
    arrivals: Any, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s, notices = 0.0, []
    monkeypatch.setattr("dhp_ray.runtime.driver.recovery.monotonic", lambda: time.monotonic() + later_s)
    found = arrivals("load")

    def looks(until: int) -> bool:
        """Look once more, ten seconds later."""
        nonlocal later_s
        later_s += 10.0
        found.ready()
        notices.extend(reported(found))
        return len(notices) == until

    wait_until(lambda: looks(3))
    gate.touch()
    wait_until(found.ready)
    later_s += 1e6
    assert looks(3)  # it may wait for others before it is taken
    (member,) = found.take(1)
    for notice, seconds in zip(notices, (60, 180, 360)):
        words, _, said = notice.text.partition(": ")
        assert words == f"a new worker ({member.place}) loads the model"
        assert seconds <= float(said.split()[0]) < seconds + 20
