"""However a run ends, its last message says so."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from dhp_ray.config import load
from dhp_ray.data.errors import BadRows, DataError
from dhp_ray.data.stream import GlobalBatch
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Plan, Sample
from dhp_ray.runtime.driver.dispatch import DispatchedStep, FinishedStep
from dhp_ray.runtime.driver.driver import MOST_SKIPPED, Driver, failed, untrained
from dhp_ray.runtime.driver.elastic import Condition
from dhp_ray.runtime.driver.feedback import Mirroring
from dhp_ray.runtime.driver.group import WorkerGroup
from dhp_ray.runtime.driver.session import Session
from dhp_ray.runtime.messages import Message, RunError, RunFinished, StepOrder
from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.runtime.records.run_records import RunRecords
from dhp_ray.runtime.records.tensorboard import ScalarLog, StepPictures
from dhp_ray.storage import Folder, StorageError


class Gone(Checkpoints):
    """On an object store that answers no more."""

    def newest_step(self) -> int:
        raise StorageError("checkpoints: cannot be listed: no answer")


def driver_without_storage(tmp_path: Path, records: Any, checkpoints: Checkpoints) -> Driver:
    """Its run folder cannot be made, which is what ends the run."""
    (tmp_path / "file").write_text("")
    driver = Driver(load(["data.format=synthetic", "data.path=unused", f"run.dir={tmp_path}/file/run"]), {}, ("", 0),
                    takes_over=False)
    session: Any = SimpleNamespace(close=lambda pictures_s: records.close(), checkpoints=checkpoints)
    driver.session = session
    return driver


def test_a_run_whose_storage_is_gone_ends_with_its_error(tmp_path: Path) -> None:
    """The newest checkpoint, which the line would name, cannot be found out either."""
    driver = driver_without_storage(tmp_path, RunRecords(Folder(str(tmp_path / "records"))),
                                    Gone(Folder(str(tmp_path)), 2))
    messages: list[Message] = []
    thread = Thread(target=lambda: messages.extend(driver.run()), daemon=True)
    thread.start()
    thread.join(10)
    assert [type(message) for message in messages] == [RunFinished]
    assert isinstance(messages[0], RunFinished)
    assert messages[0].error.startswith("run.dir: ")
    assert messages[0].error.endswith("; besides: checkpoints: cannot be listed: no answer")


def test_a_run_that_cannot_go_on_from_its_checkpoint_does_not_name_it(tmp_path: Path) -> None:
    """With the weights there no gradient is finite, whatever the learning rate is."""
    driver = driver_without_storage(tmp_path, SimpleNamespace(close=lambda: None),
                                    SimpleNamespace(newest_step=lambda: 40))  # type: ignore[arg-type]
    for driver.num_skipped, names in ((MOST_SKIPPED - 1, True), (MOST_SKIPPED, False)):
        [ended] = list(driver.run())
        assert isinstance(ended, RunFinished)
        assert ("the newest checkpoint is step 40" in ended.error) == names


def test_what_a_run_writes_is_brought_up_to_date_when_an_error_ends_it(
    object_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line may say `see events.jsonl`; on an object store that is as old as the last upload. Nothing stays here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Folder(f"s3://bucket/{tmp_path.name}/run{object_store}")
    curves = folder.child("tensorboard")
    session: Any = SimpleNamespace(records=RunRecords(folder), scalars=ScalarLog(curves, 1),
                                   watch=StepPictures(folder, 0), checkpoints=Checkpoints(folder, 2))
    session.close = partial(Session.close, session)

    def uploaded() -> list[bytes]:
        return [curves.read(name) for name in curves.names("")] + [
            folder.read(name) for name in folder.names("") if name == "events.jsonl"]

    for step, bring in ((1, partial(Session.flush, session)), (2, partial(failed, session, "no room"))):
        session.scalars.scalars(step, {f"curve_{step}": 1.0})
        session.records.event(f"kind_{step}")
        bring()
        written = b"".join(uploaded())
        assert f"curve_{step}".encode() in written
        assert f"kind_{step}".encode() in written
    assert not [*tmp_path.glob("*.jsonl"), *tmp_path.glob("*tensorboard*")]
    assert failed(session, "no room") == RunFinished("", "no room", status=1)  # though all is closed


@pytest.mark.parametrize(("last_step", "said"), [
    (2, "no step of 2 has trained anything: none of their samples can be used, or none of their gradients is finite "
        "(see skipped.jsonl and events.jsonl); allowed: other data or settings, and another run.dir"),
    (0, "batch.global_samples: got 16; no epoch has so many usable samples, and batch.drop_last=true leaves a smaller "
        "batch out")])
def test_a_run_that_has_trained_nothing_does_not_ask_to_go_on(last_step: int, said: str) -> None:
    """It has a checkpoint of its last step, from which the same command would end in the same way."""
    closed: list[bool] = []
    session: Any = SimpleNamespace(config=load(["data.format=synthetic", "data.path=unused"]), records=SimpleNamespace(
        last_step=last_step), close=lambda: closed.append(True))
    assert untrained(session) == RunFinished("", said, status=1)
    assert closed == [True]


def dispatched_of(step: int, good: list[str], bad: list[str], rows: list[tuple[int, int, str]]) -> DispatchedStep:
    """A step of a batch whose samples are `good`; `bad` rows were left out of it."""
    samples = [Sample(name, 8) for name in good]
    batch = GlobalBatch(0, samples, {}, dict.fromkeys(bad, "no image"),
                        {"epoch": 0, "num_rows": 100, "row": 16 * step}, {}, rows)
    plan = Plan("dhp", "step", ClusterSpec(1, 1, 64), tuple(samples), (), 1.0, 1.0)
    return DispatchedStep(step, batch, plan, "1.1.1", False, [], Future())


def counting_driver(*num_rows: int) -> Driver:
    driver = Driver(load(["data.format=synthetic", "data.path=unused", "run.dir=unused"]), {}, ("", 0),
                    takes_over=False)
    driver.bad_rows = [BadRows(f"source{number}", rows) for number, rows in enumerate(num_rows)]
    return driver


def test_a_bad_sample_ends_the_run_with_the_way_to_go_on() -> None:
    driver = counting_driver(5)
    driver.config.data.on_error = "fail"
    for step, bad, failures in ((1, ["c"], {}), (2, [], {"a": "no image"})):
        dispatcher = SimpleNamespace(failures=lambda dispatched, found=failures: found)
        session: Any = SimpleNamespace(current=SimpleNamespace(dispatcher=dispatcher))
        assert driver._launch(session, dispatched_of(step, ["a", "b"], bad, [])) is None
        assert driver.refused == f"sample {'c' if bad else 'a'}: no image (data.on_error=fail; skip leaves it out)"


def test_rows_that_do_not_decode_count_with_those_whose_headers_are_bad() -> None:
    driver = counting_driver(5)
    first = dispatched_of(1, ["a", "b"], ["c"], [(0, 1, "a"), (0, 2, "c"), (0, 3, "b")])
    driver._count_bad_rows(first, {"a": "truncated", "b": "truncated"})
    driver._count_bad_rows(first, {"a": "truncated", "b": "truncated"})  # launched again after a recovery
    with pytest.raises(DataError) as caught:
        driver._count_bad_rows(dispatched_of(2, ["e", "f"], ["d"], [(0, 4, "d"), (0, 5, "e"), (0, 1, "f")]),
                               {"e": "truncated", "f": "truncated"})
    assert str(caught.value) == "data.path: source0 has no usable row; the last, e: truncated"


def test_bad_rows_count_by_source_and_in_the_order_of_the_stream() -> None:
    driver = counting_driver(3, 100)
    rows = [(1, 1, "1/a"), (0, 1, "0/a"), (0, 2, "0/b"), (0, 3, "0/c")]
    driver._count_bad_rows(dispatched_of(1, [name for _, _, name in rows], [], rows), {"0/b": "cut", "0/c": "cut"})
    rows = [(0, 1, "0/b~2"), (1, 2, "1/b"), (0, 2, "0/c~2"), (0, 3, "0/a~2"), (0, 1, "0/a~3")]
    driver._count_bad_rows(dispatched_of(2, [name for _, _, name in rows], [], rows),
                           {"0/b~2": "cut", "0/c~2": "cut", "0/a~3": "cut"})
    with pytest.raises(DataError, match=r"^data.path: source0 has no usable row; the last, 0/b~3: cut$"):
        driver._count_bad_rows(dispatched_of(3, ["0/c~3", "1/c", "0/b~3"], [], [
            (0, 2, "0/c~3"), (1, 3, "1/c"), (0, 3, "0/b~3")]), {"0/c~3": "cut", "0/b~3": "cut"})


def stepping(
    monkeypatch: pytest.MonkeyPatch, num_steps: int, dispatched: Callable[[DispatchedStep], object],
    committed: Callable[[FinishedStep], object], result: Callable[[StepOrder], Any],
) -> tuple[Driver, Any]:
    """A driver and its session of one rank. Each step is of one sample, and the rank reports `result(order)`;
    the others are told of what is dispatched and committed.
    """
    driver, begun = counting_driver(100), list[StepOrder]()
    monkeypatch.setattr(driver.draining, "ids", frozenset)

    def dispatch(step: int) -> DispatchedStep | None:
        if step > num_steps:
            return None
        found = dispatched_of(step, [f"{step}"], [], [(0, step, f"{step}")])
        dispatched(found)
        return found

    monkeypatch.setattr(WorkerGroup, "size", 1)
    monkeypatch.setattr(driver.group, "start", lambda method, order: begun.append(pickle.loads(order)))
    monkeypatch.setattr(driver.group, "collect", lambda calls, **limits: [result(begun[-1])])
    dispatcher = SimpleNamespace(dispatch=dispatch, take=dispatch, begin=lambda step: None, needed_ranks=1,
                                 started=lambda dispatched: None, failures=lambda dispatched: {})
    session: Any = SimpleNamespace(
        group=driver.group, stopping="", total_steps=num_steps, max_workers=1, mirroring=Mirroring("0"),
        records=SimpleNamespace(last_step=0), report_mode=lambda: None, stuck_s=lambda plan: 1.0,
        history=SimpleNamespace(step_times_s=[]), current=SimpleNamespace(
            dispatcher=dispatcher, meter=SimpleNamespace(no_good=list),
            evaluation=SimpleNamespace(when_due=lambda step, last: {})))
    driver.commits = SimpleNamespace(  # type: ignore[assignment]
        save_when_due=lambda *arguments, **last: None, commit=committed, save_last=lambda: None)
    return driver, session


def test_a_generation_keeps_only_the_batches_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps a dispatched step keeps its payload in the object store, the first step's too."""
    made, kept = dict[int, weakref.ref[DispatchedStep]](), list[list[int]]()
    driver, session = stepping(
        monkeypatch, 4, lambda step: made.update({step.step: weakref.ref(step)}),
        lambda finished: kept.append([step for step, found in made.items() if found()]),
        lambda order: SimpleNamespace(applied=True, num_valid_tokens=1))
    assert driver._steps(session) == ""
    assert kept == [[1, 2], [2, 3], [3, 4], [4]]


@pytest.mark.parametrize("applied", [0, 7])
def test_updates_that_are_skipped_many_times_in_a_row_end_the_run(
    monkeypatch: pytest.MonkeyPatch, applied: int
) -> None:
    """One that is applied in between shows that the weights are still good; a step without a token shows nothing."""
    committed: list[int] = []
    driver, session = stepping(
        monkeypatch, 60, lambda step: None, lambda finished: committed.append(finished.step),
        lambda order: SimpleNamespace(applied=order.step == applied, num_valid_tokens=int(order.step != 10)))
    last = applied + 1 + MOST_SKIPPED
    with pytest.raises(RunError) as caught:
        driver._steps(session)
    assert committed == list(range(1, last + 1))
    assert str(caught.value) == (
        f"step {last}: the gradient has not been finite in 20 steps in a row, and the model stays as it is; allowed: a "
        "lower train.learning_rate or other data, and another run.dir")


def test_a_run_ends_normally_though_updates_were_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, session = stepping(
        monkeypatch, 60, lambda step: None, lambda finished: None,
        lambda order: SimpleNamespace(applied=order.step % MOST_SKIPPED == 0, num_valid_tokens=1))
    assert driver._steps(session) == ""


@pytest.mark.parametrize(("mirrored", "saved", "drained", "left"), [
    (6, 6, False, None), (7, 6, False, {0: Condition.SLOW}), (None, 7, False, {0: Condition.SLOW}),
    (6, 6, True, {1: Condition.DRAINED})])
def test_a_slow_worker_stays_while_nothing_but_it_has_its_state(
    monkeypatch: pytest.MonkeyPatch, mirrored: int | None, saved: int, drained: bool, left: dict[int, Condition] | None
) -> None:
    """The save before it leaves has failed. What is drained leaves in any case."""
    driver, session = stepping(monkeypatch, 9, lambda step: None, lambda finished: None, lambda order: None)
    changes, formed = ["rank 0 is too slow", ""], list[dict[int, Condition]]()

    def steps(session: Any) -> str:
        driver.leaving = {0: Condition.SLOW} | ({1: Condition.DRAINED} if drained else {})
        return changes.pop(0)

    monkeypatch.setattr(driver, "_steps", steps)
    monkeypatch.setattr(driver.group, "words", lambda rank, condition: f"rank {rank}")
    monkeypatch.setattr(WorkerGroup, "size", 2)
    monkeypatch.setattr("dhp_ray.runtime.driver.driver.reconfigure",
                        lambda session, pending, cause, broken, leaving, unresponsive: formed.append(dict(leaving)))
    for name in ("export", "finish"):
        monkeypatch.setattr(f"dhp_ray.runtime.driver.driver.{name}", lambda *arguments: None)
    session.records = SimpleNamespace(last_step=7, has_trained=True)
    session.mirroring.last, session.checkpoints = mirrored, SimpleNamespace(newest_step=lambda: saved)
    vars(driver.commits).update(finish_saves=lambda: None, recovered=lambda *arguments: None)
    driver._train(session, "")
    assert formed == ([] if left is None else [left])
    assert changes == []


def test_the_learning_rate_follows_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every second one cannot be used."""
    orders: list[StepOrder] = []

    def result(order: StepOrder) -> Any:
        orders.append(order)
        return SimpleNamespace(applied=True, num_valid_tokens=1)

    driver, session = stepping(monkeypatch, 3, lambda step: None, lambda finished: None, result)
    driver.config.run.steps, driver.config.batch.global_samples = 0, 8
    assert driver._steps(session) == ""
    assert [(order.step, order.schedule_step) for order in orders] == [(1, 2.0), (2, 4.0), (3, 6.0)]
