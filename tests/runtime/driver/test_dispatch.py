"""Dispatching against real actors: blocks, images, and plans that are made beside the step before."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from threading import Event, Timer
from typing import Any

import pytest
import ray

from dhp_ray.comm.group_cache import GroupCacheState
from dhp_ray.config import CONF, load
from dhp_ray.data.stream import GlobalBatch
from dhp_ray.planner import LAST_RESORT, PLANNERS, CostModel, warm_up
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import RankPlan, Sample, planned_samples
from dhp_ray.runtime.driver.dispatch import BatchReader, Dispatcher
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle
from dhp_ray.runtime.rank_slices import unpacked_slice

SAMPLES = [Sample("a", 8, 4, ((1, 4, 4),)), Sample("b", 9), Sample("c", 7, 8, ((1, 4, 4), (1, 4, 4)))]


class Listener:
    """Takes slices of plans as a worker does, and decodes nothing."""
    def __init__(self) -> None:
        self.sent: list[tuple[RankPlan, int]] = []

    def prefetch(self, packed: bytes, references: list[ray.ObjectRef]) -> dict[str, str]:
        plan, blocks = unpacked_slice(packed, references)
        self.sent.append((plan, sum(len(block.rows) for block in blocks)))
        return {}

    def forget(self) -> None:
        self.sent.clear()

    def plans(self, whole: bool = False) -> list[Any]:
        return self.sent if whole else [(plan.step, plan.plan_id) for plan, _ in self.sent]


class Batches:
    """A stream of three batches."""

    epoch, cursor = 0, None

    def __init__(self) -> None:
        self.left = [GlobalBatch(0, SAMPLES, {sample.id: (ray.put(1), 0) for sample in SAMPLES})
                     for _ in range(3)]

    def next_batch(self, num_samples: int) -> GlobalBatch | None:
        return self.left.pop(0) if self.left else None


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[WorkerGroup]:
    warm_up()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the cluster's processes do not import tests
    group = WorkerGroup([WorkerHandle(slot, ray.remote(num_cpus=0)(Listener).remote()) for slot in range(2)])
    yield group
    for member in group.members:
        ray.kill(member.actor)


@pytest.fixture
def dispatcher(group: WorkerGroup) -> Iterator[Dispatcher]:
    group.call("forget")
    config = load(["data.format=synthetic", "data.path=unused", "batch.global_samples=3", "planner.sync=step"])
    written: dict[int, Any] = {}
    cost = CostModel.load(str(CONF / "cost" / "cpu.yaml"))
    reader = BatchReader(Batches(), config)  # type: ignore[arg-type]
    made = Dispatcher(reader, group, ClusterSpec(2, 2, 64), cost, config, GroupCacheState(4), 3,
                      write_plan=written.__setitem__, scale=lambda: 1.0)
    made.written = written  # type: ignore[attr-defined]
    yield made
    made.stop()


def sent(dispatcher: Dispatcher) -> list[list[tuple[int, str]]]:
    """(step, plan id) of every plan that each rank was sent."""
    return dispatcher.group.call("plans")


def finished(dispatcher: Dispatcher) -> None:
    """Wait until the planning thread is done with the step that it is at."""
    assert dispatcher._planning is not None
    wait([dispatcher._planning.ahead], timeout=30)


class SlowPlanner:
    """Stands in for `dhp`: the first plan is held back until it is released."""

    def __init__(self) -> None:
        self.released, self.finished, self.calls, self.planned = Event(), Event(), 0, PLANNERS["dhp"]

    def __call__(self, problem: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            self.released.wait(30)
        schedule = self.planned(problem)
        self.finished.set()
        return schedule


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPlanner]:
    planner = SlowPlanner()
    monkeypatch.setitem(PLANNERS, "dhp", planner)
    yield planner
    planner.released.set()


@pytest.mark.parametrize("encoder", ["group", "world"])
def test_a_plan_is_made_beside_the_step_and_written_before_it_is_sent(dispatcher: Dispatcher, encoder: str) -> None:
    dispatcher.config.planner.encoder = encoder
    dispatcher.begin(1)
    finished(dispatcher)
    taken = dispatcher.take(1)
    assert taken is not None
    assert (taken.step, taken.plan.planner, taken.plan_id, taken.late) == (1, "dhp", "3.1.1", False)
    written = dispatcher.written[1]  # type: ignore[attr-defined]
    assert (written["id"], written["late"], written["vision"]["layout"],
            written["batch"]) == ("3.1.1", False, encoder, {"epoch": 0, "cursor": {}, "skipped": []})
    assert dispatcher.failures(taken) == {}
    assert sent(dispatcher) == [[(1, "3.1.1")]] * 2
    for (plan, num_rows), in dispatcher.group.call("plans", True):
        assert plan == taken.plan.rank_plans(1, "3.1.1", with_process_groups=False)[plan.rank]
        assert num_rows == len({sample.id for sample in planned_samples(plan)})


def test_a_late_plan_is_replaced_by_a_fast_one(dispatcher: Dispatcher, slow: SlowPlanner) -> None:
    dispatcher.begin(1)
    begun = time.perf_counter()
    taken = dispatcher.take(1)
    waited_s = time.perf_counter() - begun
    assert taken is not None
    assert (taken.plan.planner, taken.late) == (LAST_RESORT, True)
    assert (dispatcher.written[1]["planner"],
            dispatcher.written[1]["late"]) == (LAST_RESORT, True)  # type: ignore[attr-defined]
    assert waited_s < 5


def test_a_late_plan_is_not_sent_though_the_next_step_has_begun(dispatcher: Dispatcher, slow: SlowPlanner) -> None:
    """Its thread finishes while step 2 is being planned: neither the file, nor what the ranks have, nor the pool's book
    may change.
    """
    dispatcher.begin(1)
    taken = dispatcher.take(1)
    assert taken is not None
    dispatcher.started(taken)
    file, book = dict(dispatcher.written[1]), dispatcher.pool.held()  # type: ignore[attr-defined]
    dispatcher.begin(2)
    slow.released.set()
    finished(dispatcher)  # step 2's planning, which the same thread does after step 1's
    assert slow.finished.is_set()
    assert dispatcher.written[1] == file  # type: ignore[attr-defined]
    assert dispatcher.pool.held() == book
    following = dispatcher.take(2)
    assert following is not None
    assert (following.plan.planner, following.late) == ("dhp", False)
    assert sent(dispatcher) == [[(1, taken.plan_id), (2, following.plan_id)]] * 2
    assert dispatcher.written[2]["id"] == following.plan_id  # type: ignore[attr-defined]


def test_a_dropped_planning_sends_nothing(dispatcher: Dispatcher, slow: SlowPlanner) -> None:
    dispatcher.begin(1)
    dispatcher.drop()
    slow.released.set()
    finished(dispatcher)
    assert sent(dispatcher) == [[], []]
    assert dispatcher.written == {}  # type: ignore[attr-defined]


def test_stopping_waits_for_no_plan(dispatcher: Dispatcher, slow: SlowPlanner) -> None:
    dispatcher.begin(1)
    wait([dispatcher._planning.reading])  # type: ignore[union-attr]
    begun = time.perf_counter()
    assert list(dispatcher.stop()) == [1]
    assert time.perf_counter() - begun < 5


def test_before_a_step_has_been_measured_a_plan_is_waited_for(dispatcher: Dispatcher, slow: SlowPlanner) -> None:
    dispatcher.scale = lambda: None
    dispatcher.begin(1)
    Timer(0.5, slow.released.set).start()
    taken = dispatcher.take(1)
    assert taken is not None
    assert (taken.plan.planner, taken.late) == ("dhp", False)


def test_compiling_is_not_planning(dispatcher: Dispatcher) -> None:
    dispatcher.compiled, dispatcher.scale = Future(), lambda: None
    dispatcher.begin(1)
    Timer(1.0, dispatcher.compiled.set_result, (1.0,)).start()
    taken = dispatcher.take(1)
    assert taken is not None
    assert not taken.late
    assert taken.plan.planning_time_s < 1.0


def test_the_book_of_pools_follows_what_the_ranks_are_told_to_run(dispatcher: Dispatcher) -> None:
    """As with an evaluation between two steps: the plan that was made first is met last."""
    dispatcher.reader.stream.left[:] = [replace(batch, samples=[Sample(name, 100)],
                                         payload={name: (ray.put(1), 0)})  # type: ignore[union-attr]
                                 for name, batch in zip("abc", dispatcher.reader.stream.left)]  # type: ignore[union-attr]
    first = dispatcher.dispatch(1)
    assert first is not None
    assert dispatcher.pool.held() == []
    dispatcher.started(first)
    assert dispatcher.pool.held() == [(0, 1)]
    following = dispatcher.dispatch(2)
    assert following is not None
    assert following.plan.inputs["pool"] == [[0, 1]]


def test_the_end_of_the_data_is_no_batch(dispatcher: Dispatcher) -> None:
    dispatcher.config.run.steps = 0
    assert [dispatcher.dispatch(step) is None for step in (1, 2, 3, 4)] == [False, False, False, True]
    assert dispatcher.reader.at_end


def test_a_batch_that_needs_more_ranks_is_kept(dispatcher: Dispatcher) -> None:
    dispatcher.reader.stream.left[0] = GlobalBatch(0, [Sample("long", 200)], {"long": (ray.put(1), 0)}, {},
                                      {})  # type: ignore[union-attr]
    assert dispatcher.dispatch(1) is None
    assert not dispatcher.reader.at_end
    assert dispatcher.needed_ranks == 4
    assert list(dispatcher.stop()) == [1]


def test_nothing_is_planned_for_ranks_that_do_not_hold_the_state(dispatcher: Dispatcher) -> None:
    """However short the sequences are. A run that has no batch yet waits for ranks as well."""
    dispatcher.least_ranks = 3
    assert dispatcher.needed_ranks == 3
    assert dispatcher.dispatch(1) is None
    assert not dispatcher.reader.at_end


class Unread(Batches):
    """A stream whose next batch does not come."""

    def __init__(self) -> None:
        self.asked, self.released = Event(), Event()

    def next_batch(self, num_samples: int) -> GlobalBatch | None:
        self.asked.set()
        self.released.wait(60)
        return None


def test_a_run_that_is_to_end_waits_for_no_batch(dispatcher: Dispatcher) -> None:
    stream, reason = Unread(), ""
    dispatcher.reader.stream, dispatcher.config.run.steps = stream, 0  # type: ignore[assignment]
    dispatcher.stopping = lambda: reason
    dispatcher.begin(1)
    assert stream.asked.wait(30)
    reason = "SIGTERM"
    begun = time.perf_counter()
    assert dispatcher.take(1) is None
    assert dispatcher.stop() == {}
    assert time.perf_counter() - begun < 5
    assert dispatcher._planning is not None
    assert not dispatcher._planning.reading.done()
    stream.released.set()
    assert dispatcher._planning.reading.result(30) is None


def test_a_batch_that_is_being_read_holds_up_no_change_of_membership(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next dispatcher goes on at once with the batches that there are; the one under way joins them and is read
    once.
    """
    released, stream = Event(), dispatcher.reader.stream
    assert dispatcher.dispatch(1) is not None
    take = stream.next_batch

    def slow(num_samples: int) -> GlobalBatch | None:
        assert released.wait(30)
        return take(num_samples)

    monkeypatch.setattr(stream, "next_batch", slow)
    dispatcher.begin(2)
    dispatcher.end_planning()
    following = Dispatcher(dispatcher.reader, dispatcher.group, dispatcher.cluster, dispatcher.cost, dispatcher.config,
                           GroupCacheState(4), 4)
    again = following.dispatch(1)
    assert again is not None
    assert again.plan_id == "4.1.1"
    assert list(dispatcher.reader.batches) == [1]
    following.begin(2)
    released.set()
    assert following.take(2) is not None
    assert sorted(following.stop()) == [1, 2]
    assert len(stream.left) == 1  # type: ignore[union-attr]
    assert [step for step, _ in sent(following)[0]] == [1, 1, 2]
