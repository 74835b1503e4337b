"""However a run ends, its last message says so."""

from __future__ import annotations

from concurrent.futures import Future
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
from dhp_ray.runtime.driver.dispatch import DispatchedStep
from dhp_ray.runtime.driver.driver import Driver, untrained
from dhp_ray.runtime.messages import Message, RunFinished
from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.runtime.records.run_records import RunRecords
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
    session: Any = SimpleNamespace(records=records, checkpoints=checkpoints)
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


def test_logs_are_brought_up_to_date_when_an_error_ends_the_run(tmp_path: Path) -> None:
    """The line may say `see events.jsonl`; on an object store that is as old as the last upload."""
    flushed: list[bool] = []
    driver = driver_without_storage(tmp_path, SimpleNamespace(flush=lambda: flushed.append(True)),
                                    Checkpoints(Folder(str(tmp_path)), 2))
    assert len(list(driver.run())) == 1
    assert flushed == [True]


@pytest.mark.parametrize(("last_step", "said"), [
    (2, "no step of 2 has trained anything: none of their samples can be used (see skipped.jsonl); allowed: other "
        "data, and another run.dir"),
    (0, "batch.global_samples: got 16; no epoch has so many usable samples, and batch.drop_last=true leaves a smaller "
        "batch out")])
def test_a_run_that_has_trained_nothing_does_not_ask_to_go_on(last_step: int, said: str) -> None:
    """It has a checkpoint of its last step, from which the same command would end in the same way."""
    flushed: list[bool] = []
    session: Any = SimpleNamespace(config=load(["data.format=synthetic", "data.path=unused"]), records=SimpleNamespace(
        last_step=last_step, flush=lambda: flushed.append(True)))
    assert untrained(session) == RunFinished("", said, status=1)
    assert flushed == [True]


def dispatched_of(step: int, good: list[str], bad: list[str], rows: list[tuple[int, str]]) -> DispatchedStep:
    """A step of a batch whose samples are `good`; `bad` rows were left out of it."""
    samples = [Sample(name, 8) for name in good]
    batch = GlobalBatch(0, samples, {}, dict.fromkeys(bad, "no image"), {}, {}, rows)
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
    first = dispatched_of(1, ["a", "b"], ["c"], [(0, "a"), (0, "c"), (0, "b")])
    driver._count_bad_rows(first, {"a": "truncated", "b": "truncated"})
    driver._count_bad_rows(first, {"a": "truncated", "b": "truncated"})  # launched again after a recovery
    with pytest.raises(DataError) as caught:
        driver._count_bad_rows(dispatched_of(2, ["e", "f"], ["d"], [(0, "d"), (0, "e"), (0, "f")]),
                               {"e": "truncated", "f": "truncated"})
    assert str(caught.value) == "data.path: source0 has no usable row; the last, e: truncated"


def test_bad_rows_count_by_source_and_in_the_order_of_the_stream() -> None:
    driver = counting_driver(3, 100)
    rows = [(1, "1/a"), (0, "0/a"), (0, "0/b"), (0, "0/c")]
    driver._count_bad_rows(dispatched_of(1, [name for _, name in rows], [], rows), {"0/a": "cut", "0/c": "cut"})
    with pytest.raises(DataError, match=r"^data.path: source0 has no usable row; the last, 0/e: cut$"):
        driver._count_bad_rows(dispatched_of(2, ["1/b", "0/d", "0/e"], [], [(0, "0/d"), (1, "1/b"), (0, "0/e")]),
                               {"0/d": "cut", "0/e": "cut"})
