"""Dispatching against real actors: blocks, images, and plans that are made beside the step before."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from threading import Event
from typing import Any

import pytest
import ray

from dhp_ray.config import CONF, load
from dhp_ray.data.stream import Batch
from dhp_ray.planner import LAST_RESORT, PLANNERS, CostModel
from dhp_ray.planner.plan import ClusterSpec, RankPack, RankPlan, Sample
from dhp_ray.runtime.dispatch import Dispatcher, blocks_of
from dhp_ray.runtime.group import Member, WorkerGroup
from dhp_ray.runtime.prefetch import encoded_images

SAMPLES = [Sample("a", 8, 4, ((1, 4, 4),)), Sample("b", 9), Sample("c", 7, 8, ((1, 4, 4), (1, 4, 4)))]


def test_each_block_is_sent_once_with_the_rows_that_a_rank_needs(ray_cluster: None) -> None:
    first, second = ray.put(1), ray.put(2)
    batch = Batch(0, SAMPLES, {"a": (second, 5), "b": (first, 0), "c": (second, 2)}, [], {"epoch": 0, "fragment": 0, "row": 0, "num_rows": 9})
    plan = RankPlan(1, 0, (), (RankPack(0, (0,), (SAMPLES[0],), (0,), 1.0), RankPack(1, (0, 1), (SAMPLES[1], SAMPLES[2]), (1, 0), 1.0)))
    blocks = blocks_of(plan, batch)
    assert [(block.reference, block.rows) for block in blocks] == [([second], [2, 5]), ([first], [0])]


def test_a_rank_decodes_the_images_that_the_plan_gives_it() -> None:
    pack = RankPack(0, (4, 6), (SAMPLES[0], SAMPLES[1], SAMPLES[2]), (1, 0, 1), 1.0)
    assert encoded_images(pack, 4) == [(False,), (), (True, False)]
    assert encoded_images(pack, 6) == [(True,), (), (False, True)]


class Listener:
    """Takes slices of plans as a worker does, and decodes nothing."""

    def prefetch(self, plan: RankPlan, blocks: list[Any]) -> dict[str, str]:
        return {}


class Batches:
    """A stream of two batches."""

    epoch = 0

    def __init__(self) -> None:
        self.left = [Batch(0, SAMPLES, {sample.id: (ray.put(1), 0) for sample in SAMPLES}, [], {}) for _ in range(2)]

    def next_batch(self, num_samples: int) -> Batch | None:
        return self.left.pop(0) if self.left else None


@pytest.fixture
def dispatcher(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dispatcher]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the cluster's processes do not import tests
    group = WorkerGroup([Member(slot, ray.remote(num_cpus=0)(Listener).remote()) for slot in range(2)])
    config = load(["data.format=synthetic", "data.path=unused", "batch.global_samples=3"])
    written: dict[int, Any] = {}
    cost = CostModel.load(str(CONF / "cost" / "cpu.yaml"))
    made = Dispatcher(Batches(), group, ClusterSpec(2, 2, 64), cost, config, write_plan=written.__setitem__)  # type: ignore[arg-type]
    made.written = written  # type: ignore[attr-defined]
    yield made
    made.stop()
    for member in group.members:
        ray.kill(member.actor)


def test_a_plan_is_made_beside_the_step_and_written_before_it_is_sent(dispatcher: Dispatcher) -> None:
    dispatcher.begin(1)
    wait([dispatcher._ahead])  # type: ignore[list-item]
    taken = dispatcher.take(1, step_time_s=1.0)
    assert taken is not None
    assert (taken.step, taken.plan.planner, dispatcher.late_plans) == (1, "dhp", 0)
    assert dispatcher.written[1]["batch"] == {"epoch": 0, "cursor": {}, "skipped": []}  # type: ignore[attr-defined]
    assert dispatcher.failures(taken) == {}


def test_a_late_plan_is_replaced_by_a_fast_one_and_counted(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    released, planned = Event(), PLANNERS["dhp"]

    def slow(problem: Any) -> Any:
        released.wait(30)
        return planned(problem)

    monkeypatch.setitem(PLANNERS, "dhp", slow)
    dispatcher.begin(1)
    begun = time.perf_counter()
    taken = dispatcher.take(1, step_time_s=1.0)
    waited_s = time.perf_counter() - begun
    assert taken is not None
    assert (taken.plan.planner, dispatcher.late_plans) == (LAST_RESORT["step"], 1)
    assert waited_s < 5
    released.set()
    assert dispatcher._ahead is not None
    assert dispatcher._ahead.result() is None  # what came late was not sent
    dispatcher.begin(2)
    following = dispatcher.take(2, step_time_s=60.0)
    assert following is not None
    assert following.plan.planner == "dhp"
    assert dispatcher.late_plans == 1


def test_the_end_of_the_data_is_no_batch(dispatcher: Dispatcher) -> None:
    dispatcher.config.run.steps = 0
    assert [dispatcher.dispatch(step) is None for step in (1, 2, 3)] == [False, False, True]
    assert dispatcher.at_end


def test_a_batch_that_needs_more_ranks_is_kept(dispatcher: Dispatcher) -> None:
    dispatcher.stream.left[0] = Batch(0, [Sample("long", 200)], {"long": (ray.put(1), 0)}, [], {})  # type: ignore[union-attr]
    assert dispatcher.dispatch(1) is None
    assert not dispatcher.at_end
    assert dispatcher.needed_ranks == 4
    assert list(dispatcher.stop()) == [1]
