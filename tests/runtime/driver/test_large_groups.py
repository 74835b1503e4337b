"""What the driver does for each rank of a large group: a bounded number of calls, and work that grows with the ranks,
not with their square.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from benchmarks.driver_loop import ready_driver
from benchmarks.driver_loop_ranks import prepared_handles
from dhp_ray.comm.group_cache import GroupCacheState
from dhp_ray.config import CONF, load
from dhp_ray.data.stream import GlobalBatch
from dhp_ray.planner import CostModel, plan_batch
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Sample
from dhp_ray.runtime.driver.dispatch import Dispatcher
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle
from dhp_ray.runtime.messages import StepCommitted

COST = CostModel.load(str(CONF / "cost" / "cpu.yaml"))


class Handle:
    """An actor handle whose every call is answered at once; it counts them, and the bytes that they carry."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls, self.num_bytes = answer, 0, 0

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=self._call)

    def _call(self, *arguments: Any) -> Any:
        self.calls += 1
        self.num_bytes += sum(len(argument) for argument in arguments if isinstance(argument, bytes))
        return self.answer


class Groups(tuple[Pack, ...]):
    """The groups of a plan, which count how often they are gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Pack]:
        Groups.passes += 1
        return super().__iter__()


def a_send(num_ranks: int, transport: str = "parent") -> tuple[int, int]:
    """The passes over the groups of a plan that is sent, and the bytes of the largest slice."""
    samples = [Sample(f"s{number}", 20 + number % 90) for number in range(2 * num_ranks)]
    group = WorkerGroup([WorkerHandle(slot, Handle(slot)) for slot in range(num_ranks)])  # type: ignore[arg-type]
    cluster = ClusterSpec(num_ranks, 8, 64)
    config = load(["data.format=synthetic", "data.path=unused", f"comm.transport={transport}"])
    dispatcher = Dispatcher(None, group, cluster, COST, config, GroupCacheState(0))  # type: ignore[arg-type]
    plan = plan_batch(samples, cluster, COST, planner="static", sync="step")
    Groups.passes = 0
    batch = GlobalBatch(0, samples, {sample.id: (None, 0) for sample in samples}, {}, {})  # type: ignore[misc]
    sent = dispatcher._send(1, batch, replace(plan, groups=Groups(plan.groups)), False)
    dispatcher.end_planning()
    assert len(sent.prefetches) == num_ranks
    assert [member.actor.calls for member in group.members] == [1] * num_ranks  # type: ignore[attr-defined]
    return Groups.passes, max(member.actor.num_bytes for member in group.members)  # type: ignore[attr-defined]


def work_of_steps(num_ranks: int, folder: Path) -> tuple[int, list[Any]]:
    """Python calls in the thread of the driver's loop over three steps, with a sample a rank; the ranks' handles."""
    driver, _ = ready_driver(folder, num_ranks, num_ranks, 3, prepared_handles)
    assert driver.session is not None
    driver.session.mirroring.auto, driver.session.mirroring.every = False, 2
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        driver._steps(driver.session)
    finally:
        sys.setprofile(None)
    driver.session.current.dispatcher.stop()
    messages = [driver.messages.get_nowait() for _ in range(driver.messages.qsize())]
    assert [message.metrics["step"] for message in messages if isinstance(message, StepCommitted)] == [1, 2, 3]
    return calls, [member.actor for member in driver.group.members]


def test_a_step_of_the_driver_grows_with_the_ranks(ray_cluster: None, tmp_path: Path) -> None:
    """Four times the ranks are at most four times the work between two steps, and each rank is called twice a step, and
    once more where states are mirrored.
    """
    few, _ = work_of_steps(32, tmp_path / "few")
    many, handles = work_of_steps(128, tmp_path / "many")
    assert many <= 4.2 * few
    assert many <= 66 * 3 * 128
    assert all(handle.calls == {"prefetch": 3, "run": 3, "mirrored": 1} for handle in handles)


def test_a_plan_is_sent_in_one_pass_over_its_groups(ray_cluster: None) -> None:
    assert a_send(256)[0] == a_send(4)[0]


def test_a_slice_names_the_groups_of_others_only_for_a_pool(ray_cluster: None) -> None:
    few, many = (a_send(256, transport)[1] for transport in ("parent", "pool"))
    assert few < 600
    assert many > 2 * few


def test_answers_that_are_there_are_taken_together(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks have answered, the driver waits for calls and fetches results a few times."""
    num_ranks = 200
    answers = ray.remote(num_cpus=0)(lambda: list(range(num_ranks))).options(num_returns=num_ranks).remote()
    ray.wait(answers, num_returns=num_ranks)
    group = WorkerGroup([WorkerHandle(slot, Handle(answer)) for slot, answer in enumerate(answers)])  # type: ignore[arg-type]
    calls = {"wait": 0, "get": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    for name in calls:
        monkeypatch.setattr(ray, name, counted(name, getattr(ray, name)))
    assert group.call("run") == list(range(num_ranks))
    assert calls["wait"] <= 4
    assert calls["get"] == 1
