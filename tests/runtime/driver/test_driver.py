"""However a run ends, its last message says so."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

from dhp_ray.config import load
from dhp_ray.runtime.driver.driver import Driver
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
