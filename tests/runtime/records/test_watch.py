from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dhp_ray.runtime.records import tensorboard as module
from dhp_ray.runtime.records.tensorboard import PICTURE, ScalarLog, StepPictures
from dhp_ray.storage import Folder
from tests.report.runs import plan_of, results_of, write_run


def pictures(path: Path) -> list[tuple[int, bytes]]:
    events = EventAccumulator(str(path), size_guidance={"images": 0}).Reload()
    return [(event.step, event.encoded_image_string)
            for event in events.Images(PICTURE)] if PICTURE in events.Tags()["images"] else []


def test_due_steps_have_a_picture_and_a_trace(tmp_path: Path) -> None:
    scalars, watch = ScalarLog(Folder(str(tmp_path / "tensorboard")), 1), StepPictures(Folder(str(tmp_path)), 2)
    begun = []
    for step in range(1, 6):
        plan = plan_of(step)
        begun.append(watch.step(step, plan, results_of(plan, step), scalars))
        watch.close()
    scalars.close()
    assert begun == [True, True, False, True, False]
    assert [step for step, _ in pictures(tmp_path / "tensorboard")] == [1, 2, 4]
    assert all(png.startswith(b"\x89PNG") for _, png in pictures(tmp_path / "tensorboard"))
    assert Folder(str(tmp_path)).names("trace") == ["step_000001.json", "step_000002.json", "step_000004.json"]
    assert json.loads((tmp_path / "trace" / "step_000004.json").read_text())["otherData"]["step"] == 4


def test_never_means_never(tmp_path: Path) -> None:
    plan = plan_of(1)
    scalars = ScalarLog(Folder(str(tmp_path / "tensorboard")), 1)
    assert not StepPictures(Folder(str(tmp_path)), 0).step(20, plan, results_of(plan, 20), scalars)


def test_no_step_waits_for_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is being drawn, the call comes back at once, and a step that is due meanwhile is left out."""
    going, trace = threading.Event(), module.trace_of

    def slow_trace(*arguments: object) -> object:
        assert going.wait(30)
        return trace(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "trace_of", slow_trace)
    plan, watch = plan_of(1), StepPictures(Folder(str(tmp_path)), 1)
    scalars = ScalarLog(Folder(str(tmp_path / "tensorboard")), 1)
    assert watch.step(1, plan, results_of(plan, 1), scalars)
    assert not watch.step(2, plan, results_of(plan, 2), scalars)
    going.set()
    watch.close()
    assert Folder(str(tmp_path)).names("trace") == ["step_000001.json"]


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace").write_text("in the way of the folder")
    plan, watch = plan_of(1), StepPictures(Folder(str(tmp_path)), 1)
    scalars = ScalarLog(Folder(str(tmp_path / "tensorboard")), 1)
    watch.step(1, plan, results_of(plan, 1), scalars)
    watch.close()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("step 1 is not shown: StorageError: ")
    scalars.scalars(1, {"loss/train": 1.0})  # the run goes on


def test_a_resumed_run_shows_each_picture_once(tmp_path: Path) -> None:
    for first, last in ((1, 2), (2, 3)):
        scalars, watch = ScalarLog(Folder(str(tmp_path / "tensorboard")), first), StepPictures(Folder(str(tmp_path)), 1)
        for step in range(first, last + 1):
            plan = plan_of(step)
            watch.step(step, plan, results_of(plan, step), scalars)
            watch.close()
        scalars.close()
    assert [step for step, _ in pictures(tmp_path / "tensorboard")] == [1, 2, 3]


def test_going_back_takes_later_traces_away(tmp_path: Path) -> None:
    records = write_run(tmp_path, 3)
    for step in (1, 2, 3):
        records.folder.write(f"trace/step_{step:06d}.json", b"{}")
    records.truncate(2)
    assert records.folder.names("trace") == ["step_000001.json", "step_000002.json"]
