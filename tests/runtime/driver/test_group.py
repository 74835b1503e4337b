"""The worker group against real actors: order by node, and one line when a rank raises or dies."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
import ray

import dhp_ray.runtime.driver.group as group_module
from dhp_ray.runtime.driver.group import SURVEY_S, WorkerGroup, WorkerHandle
from dhp_ray.runtime.driver.recovery import PendingWorkers, take_over
from dhp_ray.runtime.messages import GroupError, Message, Notice, Replace, RunError, Status, StoppingError


class Actor:
    """Does what it is told, as a worker that is somewhere and may fail."""

    def __init__(self, node_id: str) -> None:
        self.node_id, self.waits, self.woken = node_id, False, Event()

    def describe(self, device: str, probe: str) -> dict[str, Any]:
        memory_bytes = {"a": 500, "b": 800}[self.node_id]
        return {"pid": os.getpid(), "node_id": self.node_id, "device": device, "memory_bytes": memory_bytes,
                "num_layers": 2}

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        return Status(call="act", mark_id="act 7", waits_for_peers=self.waits)

    @ray.method(concurrency_group="control")
    def wake(self) -> None:
        self.woken.set()

    def act(self, what: dict[int, str]) -> int:
        deed = what.get(os.getpid(), "answer")
        if deed == "raise":
            raise ValueError("step 7: this rank's own words\nand a second line")
        self.waits = deed == "wait"
        if deed in ("sleep", "wait"):
            self.woken.clear()
            self.woken.wait(60)
        if deed == "defect":
            raise KeyError("missing")
        if deed == "die":
            os._exit(1)
        if deed == "peer lost":  # what gloo says on the other ranks, some time before Ray knows of the death
            raise RuntimeError("Connection closed by peer")
        time.sleep(0.2)
        return os.getpid()


class Incomplete(Actor):
    """Lacks a package."""

    def __init__(self) -> None:
        try:
            raise KeyError("flash")
        except KeyError as error:
            raise ModuleNotFoundError("No module named 'flash'\ninstall it") from error

    def prepare(self) -> None:
        raise AssertionError


@pytest.fixture(scope="module")
def ranks(ray_cluster: None) -> Iterator[WorkerGroup]:
    """Three ranks on two nodes."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the cluster's processes do not import tests
    actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Actor)
    group = WorkerGroup([WorkerHandle(slot, actor.remote(node_id)) for slot, node_id in enumerate(("b", "a", "b"))])
    group.describe("cpu", "")
    yield group
    for member in group.members:
        ray.kill(member.actor)


@pytest.fixture
def group(ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerGroup]:
    """The same ranks for all tests; what one has told to sleep or to wait does not at the next one."""
    monkeypatch.setattr(ranks, "exchange_s", ranks.exchange_s)
    yield ranks
    ray.wait([member.actor.wake.remote() for member in ranks.members], num_returns=3, timeout=30)


def pids(group: WorkerGroup) -> list[int]:
    return [member.described["pid"] for member in group.members]


def test_ranks_of_a_node_are_neighbours(group: WorkerGroup) -> None:
    assert group.nodes == ["b", "b", "a"]
    assert [member.slot for member in group.members] == [0, 2, 1]
    assert group.memory_bytes == 400  # two ranks share a node's memory, and the third has a node to itself
    assert [rank["rank"] for rank in group.membership()] == [0, 1, 2]
    assert group.call("act", {}) == pids(group)


def test_a_worker_that_lives_and_cannot_say_where_it_is_is_replaced(ray_cluster: None) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor, told = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Actor), list[Message]()
    group = WorkerGroup([WorkerHandle(slot, actor.remote(node_id)) for slot, node_id in enumerate(("nowhere", "a"))])
    take_over(group, PendingWorkers("cpu", told.append), 1.0, lambda: group.describe("cpu", ""), str, told.append)
    assert [member.slot for member in group.members] == [1]
    assert told == [Notice("one more is lost: rank 0 (pid 0 on node ?): KeyError: 'nowhere'"), Replace(0)]
    ray.kill(group.members[0].actor)


def test_the_rank_that_raises_is_named_with_its_own_words(group: WorkerGroup) -> None:
    with pytest.raises(RunError) as caught:
        group.call("act", {pids(group)[1]: "raise"})
    assert str(caught.value) == f"rank 1 (pid {pids(group)[1]} on node b): step 7: this rank's own words"


def test_a_defect_is_named_with_its_type(group: WorkerGroup) -> None:
    with pytest.raises(RunError, match=r"rank 2 \(pid \d+ on node a\): KeyError: 'missing'"):
        group.call("act", {pids(group)[2]: "defect"})


def test_calls_may_take_longer_than_a_look_while_all_get_on(group: WorkerGroup) -> None:
    assert group.collect(group.start("act", {}), look_s=0.05) == pids(group)


def test_a_worker_that_answers_no_more_is_found_by_a_look(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "SURVEY_S", 1.5)
    stopped = pids(group)[2]
    calls = group.start("act", {})
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(GroupError, match=rf"^rank 2 \(pid {stopped} on node a\) answers no more$"):
        group.collect(calls, look_s=0.5)
    os.kill(stopped, signal.SIGCONT)


def test_a_rank_is_dead_once_the_raylet_of_its_node_is_gone(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's head takes the node for alive for some seconds more."""
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        address = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": raylet.getsockname()[1]}
    monkeypatch.setattr(ray, "nodes", lambda: [address | {"NodeID": "a", "Alive": True}])
    stopped = pids(group)[2]
    os.kill(stopped, signal.SIGSTOP)
    begun = time.monotonic()
    found = [(status.dead, status.call) for status in group.poll_health()]
    took_s = time.monotonic() - begun
    os.kill(stopped, signal.SIGCONT)
    assert found == [(False, "act"), (False, "act"), (True, "")]
    assert took_s < SURVEY_S
    # a node with a rank that answers is there, however slow its raylet is
    monkeypatch.setattr(ray, "nodes", lambda: [address | {"NodeID": "b", "Alive": True}])
    monkeypatch.setattr(group_module, "SURVEY_S", 0.5)
    os.kill(pids(group)[0], signal.SIGSTOP)
    found = [(status.dead, status.answered) for status in group.poll_health()]
    os.kill(pids(group)[0], signal.SIGCONT)
    assert found == [(False, False), (False, True), (False, True)]


def test_a_rank_that_stands_still_is_named(group: WorkerGroup) -> None:
    first, second, third = pids(group)
    calls = group.start("act", {first: "wait", second: "sleep", third: "wait"})
    with pytest.raises(GroupError, match=rf"^rank 1 \(pid {second} on node b\) is stuck$"):
        group.collect(calls, look_s=0.1, stuck_s=1.0)


def test_ranks_that_wait_for_one_another_for_too_long_are_given_up(group: WorkerGroup) -> None:
    """An exchange that never ends anywhere: no rank is to blame, and none would ever raise on a device."""
    group.exchange_s = 1.0
    calls = group.start("act", dict.fromkeys(pids(group), "wait"))
    with pytest.raises(GroupError, match=r"^all ranks have waited for one another for 1 s \(comm.timeout_s\)$"):
        group.collect(calls, look_s=0.1)


def test_a_wait_ends_with_the_run(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks go on beside it: the poll for the end is the shorter one."""
    monkeypatch.setattr(group_module, "SURVEY_S", 1.5)
    begun = time.monotonic()
    calls = group.start("act", {pids(group)[0]: "sleep"})
    with pytest.raises(StoppingError):
        group.collect(calls, look_s=0.5, stopping=lambda: "SIGTERM" if time.monotonic() > begun + 1.0 else "")
    os.kill(pids(group)[2], signal.SIGSTOP)
    with pytest.raises(GroupError, match="answers no more"):
        group.collect(calls, look_s=0.5, stopping=lambda: "")
    os.kill(pids(group)[2], signal.SIGCONT)


def test_the_death_of_a_rank_explains_what_its_peers_say(group: WorkerGroup) -> None:
    """The last of the tests: the rank does not come back."""
    first, second, third = pids(group)
    with pytest.raises(RunError) as caught:
        group.call("act", {first: "peer lost", second: "peer lost", third: "die"})
    assert str(caught.value).startswith(f"rank 2 (pid {third} on node a) died: Worker unexpectedly exits with ")
    assert group.poll_health()[2] == Status(dead=True, error=str(caught.value).partition(" died: ")[2])


def test_the_end_of_a_worker_that_cannot_start_is_told_in_the_words_of_its_error(ray_cluster: None) -> None:
    """Its process and its node are not known yet."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor: Any = ray.remote(num_cpus=0, concurrency_groups={"control": 1})(Incomplete)
    group = WorkerGroup([WorkerHandle(0, actor.remote())])
    words = "ModuleNotFoundError: No module named 'flash'"
    with pytest.raises(RunError) as caught:
        group.call("describe", "cpu", "")
    assert str(caught.value) == f"rank 0 (pid 0 on node ?) died: {words}"
    found = PendingWorkers("cpu", list[Message]().append)
    found.offer(0, group.members[0].actor)
    while not found.failed:
        found.ready()
    assert found.failed == [(0, words)]
