"""What becomes of each worker when a generation ends, as polls of their health show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dhp_ray.data import blocks
from dhp_ray.runtime.driver import recovery
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle
from dhp_ray.runtime.messages import Message, Replace, Status


class Polled(WorkerGroup):
    """Workers 0, 1, 2, ... on the nodes "0", "1", "2", ..., in the state that `statuses` gives by worker."""

    def __init__(self, number: int, statuses: Callable[[int], Status]) -> None:
        actor: Any = SimpleNamespace(abort_generation=SimpleNamespace(remote=lambda generation: None))
        super().__init__([WorkerHandle(slot, actor, {"pid": slot, "node_id": str(slot)}) for slot in range(number)])
        self.statuses = statuses

    def poll_health(self, unresponsive: Sequence[int] = ()) -> list[Status]:  # type: ignore[override]
        return [self.statuses(member.slot) for member in self.members]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """What the job's process is told, of which the actors here are no real ones."""
    monkeypatch.setattr(recovery, "ray", SimpleNamespace(
        kill=lambda actor: None, wait=lambda calls, timeout: (calls, [])))
    monkeypatch.setattr(recovery, "CAPACITY_POLL_S", 0.01)
    monkeypatch.setattr(blocks, "lost", set())
    return []


def session_of(group: WorkerGroup, told: list[Message], needed: int = 1) -> Any:
    return SimpleNamespace(
        group=group, stopping="", tell=told.append, max_workers=group.size, records=SimpleNamespace(
            last_step=0, event=lambda kind, **details: None),
        config=SimpleNamespace(elastic=SimpleNamespace(hang_s=0.1), cluster=SimpleNamespace(min_workers=1)),
        history=SimpleNamespace(stuck_s=0.0, evicted_slots=set()),
        current=SimpleNamespace(dispatcher=SimpleNamespace(needed_ranks=needed)))


def replaced(told: list[Message]) -> list[int]:
    return [message.slot for message in told if isinstance(message, Replace)]


def test_nodes_are_lost_however_long_the_run_waits_for_others(told: list[Message]) -> None:
    """Also those that go meanwhile."""
    gone = {1}
    group = Polled(3, lambda slot: Status(dead=slot in gone))
    session, polls = session_of(group, told, needed=3), [0, 0, 0, 2]

    def ready() -> list[int]:
        if len(polls) == 2:
            gone.add(2)
        return [0] * polls.pop(0)

    pending: Any = SimpleNamespace(ready=ready, report=lambda records: None)
    workers = recovery._settle(session, {}, ())
    assert blocks.lost == {"1"}
    workers = recovery._wait_for_capacity(session, pending, workers)
    assert [worker.member.slot for worker in workers if worker.healthy] == [0]
    assert blocks.lost == {"1", "2"}
    assert replaced(told) == [1, 2]


def test_a_node_on_which_others_live_is_not_lost(told: list[Message]) -> None:
    group = Polled(2, lambda slot: Status(dead=slot == 1))
    group.members[1].described["node_id"] = "0"
    recovery._settle(session_of(group, told), {}, ())
    assert blocks.lost == set()


def test_a_new_driver_takes_over_no_worker_that_has_raised(told: list[Message]) -> None:
    """It may live on and answer, and each look at the group would find it again, for ever."""
    statuses = [Status(generation=3), Status(generation=3, error="the device is lost"), Status(answered=False),
                Status(dead=True), Status()]
    group = Polled(5, lambda slot: statuses[slot])
    offered: list[int] = []
    pending: Any = SimpleNamespace(offer=lambda slot, actor: offered.append(slot))
    recovery._part(group, pending, told.append)
    assert [member.slot for member in group.members] == [0]
    assert replaced(told) == [1, 2, 3]
    assert offered == [4]


@pytest.mark.parametrize(("waits_for_peers", "ended"), [(True, [0]), (False, [0, 1, 2])])
def test_ranks_that_wait_for_a_host_that_has_vanished_are_not_all_ended(
    told: list[Message], waits_for_peers: bool, ended: list[int]
) -> None:
    """Its sockets stay open, so they wait for it, and for one another. The end of the first one frees the others."""
    def status(slot: int) -> Status:
        return Status(3, "" if waits_for_peers and replaced(told) and slot not in replaced(told) else "run",
                      waits_for_peers=waits_for_peers, dead=slot in replaced(told))

    workers = recovery._settle(session_of(Polled(3, status), told), {}, ())
    assert replaced(told) == ended
    assert [worker.member.slot for worker in workers if worker.healthy] == [slot for slot in range(3)
                                                                            if slot not in ended]
