"""What the dispatcher's threads leave behind when the driver goes on without them: no plan file too late, no row lost,
no failure unheard.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest

from dhp_ray.comm.group_cache import GroupCacheState
from dhp_ray.config import CONF, load
from dhp_ray.data.errors import DataError
from dhp_ray.data.stream import GlobalBatch
from dhp_ray.planner import LAST_RESORT, PLANNERS, CostModel
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Sample
from dhp_ray.runtime.driver.dispatch import BatchReader, Dispatcher
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle

COST = CostModel.load(str(CONF / "cost" / "cpu.yaml"))
ACTOR: Any = SimpleNamespace(prefetch=SimpleNamespace(remote=lambda packed, references: None))


class Rows:
    """A stream of numbered samples, two a batch, whose next row cannot be read where `damaged` says so."""

    epoch = 0

    def __init__(self) -> None:
        self.row, self.damaged = 0, -1

    @property
    def cursor(self) -> dict[str, int]:
        return {"row": self.row}

    def restore(self, cursor: dict[str, int]) -> None:
        self.row = cursor["row"]

    def next_batch(self, num_samples: int) -> GlobalBatch:
        samples = []
        for _ in range(num_samples):
            if self.row == self.damaged:
                raise DataError(f"row {self.row} cannot be read")
            samples.append(Sample(f"row {self.row}", 9))
            self.row += 1
        return GlobalBatch(0, samples, {sample.id: (None, 0) for sample in samples}, {}, self.cursor)  # type: ignore[misc]


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dispatcher]:
    monkeypatch.setitem(PLANNERS, "dhp", PLANNERS[LAST_RESORT])  # it has less to compile
    config = load(["data.format=synthetic", "data.path=unused", "batch.global_samples=2", "planner.sync=step"])
    stream: Any = Rows()
    group = WorkerGroup([WorkerHandle(slot, ACTOR) for slot in range(2)])
    made = Dispatcher(BatchReader(stream, config), group, ClusterSpec(2, 2, 64), COST, config, GroupCacheState(4), 3,
                      scale=lambda: 1.0)
    yield made
    made.stop()


def following(dispatcher: Dispatcher) -> Dispatcher:
    """The dispatcher of the next membership."""
    dispatcher.end_planning()
    return Dispatcher(dispatcher.reader, dispatcher.group, dispatcher.cluster, COST, dispatcher.config,
                      GroupCacheState(4), 4)


def test_a_planner_that_fails_once_another_plan_was_sent_is_heard_with_the_next_step(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = Event()

    def failing(problem: Any) -> Any:
        assert released.wait(30)
        raise PlanError("no plan")

    monkeypatch.setitem(PLANNERS, "dhp", failing)
    dispatcher.begin(1)
    taken = dispatcher.take(1)
    assert taken is not None
    assert taken.late
    late = dispatcher._planning
    assert late is not None
    released.set()
    wait([late.ahead], timeout=30)
    monkeypatch.setitem(PLANNERS, "dhp", PLANNERS[LAST_RESORT])  # it fails no more
    dispatcher.begin(2)
    with pytest.raises(PlanError, match="no plan"):
        dispatcher.take(2)


def test_a_plan_file_that_is_being_written_is_written_before_the_next_membership_plans(dispatcher: Dispatcher) -> None:
    """Written later, as on a slow object store, it would stand where the next plan of that step does."""
    begun, released, files = Event(), Event(), []

    def write(step: int, plan: dict[str, Any]) -> None:
        begun.set()
        assert released.wait(30)
        files.append(plan["id"])

    dispatcher.write_plan = write
    dispatcher.begin(1)
    assert begun.wait(30)
    Timer(0.2, released.set).start()
    dispatcher.end_planning()
    assert files == ["3.1.1"]


def test_rows_of_a_batch_that_could_not_be_read_to_its_end_are_read_again(dispatcher: Dispatcher) -> None:
    """The group broke at the same time: nobody hears of the failed batch, and the next membership asks for it anew."""
    stream: Any = dispatcher.reader.stream
    stream.damaged = 1
    dispatcher.begin(1)
    planning = dispatcher._planning
    assert planning is not None
    wait([planning.reading], timeout=30)
    stream.damaged = -1  # what kept it from being read was a node that died
    anew = following(dispatcher)
    taken = anew.dispatch(1)
    assert taken is not None
    assert [sample.id for sample in taken.batch.samples] == ["row 0", "row 1"]
    anew.stop()
