"""How many steps a run is expected to have, for its learning rate and its progress; the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from dhp_ray.config import load
from dhp_ray.runtime.driver.start import batches_of, covered_checkpoint, schedule_step, warmup_warning
from dhp_ray.runtime.messages import Message, Notice
from dhp_ray.runtime.records.checkpoints import Checkpoints, Manifest
from dhp_ray.runtime.records.run_records import RunRecords
from dhp_ray.storage import Folder, StorageError
from tests.runtime.records.test_run_records import commit


@pytest.mark.parametrize(("num_rows", "drop_last", "batches"), [
    (1000, False, 2), (1000, True, 1), (1024, True, 2), (1024, False, 2), (3, False, 1), (3, True, 1)])
def test_batches_of_an_epoch(num_rows: int, drop_last: bool, batches: int) -> None:
    config = load(["data.format=synthetic", "data.path=unused", "run.dir=unused", "batch.global_samples=512",
                   f"batch.drop_last={drop_last}"])
    assert batches_of(num_rows, config) == batches


def cursors(usable: Sequence[bool], size: int, drop_last: bool, epochs: int) -> Iterator[dict[str, int]]:
    """Those of the batches that a stream makes of these rows."""
    for epoch in range(epochs):
        row = 0
        while row < len(usable):
            samples = 0
            while row < len(usable) and samples + usable[row] <= size:
                samples, row = samples + usable[row], row + 1
            if samples == size or not drop_last:
                yield {"epoch": epoch, "num_rows": len(usable), "row": row}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_rows", [40, 43])
def test_the_schedule_ends_with_the_run_whatever_rows_can_be_used(num_rows: int, drop_last: bool) -> None:
    """Each step is as far in it as in the rows; if all can be used, and with run.steps, it is the step itself."""
    config = load(["data.format=synthetic", "data.path=unused", "run.dir=unused", "batch.global_samples=4",
                   f"batch.drop_last={drop_last}", "run.steps=0", "run.epochs=3"])
    planned = 3 * batches_of(num_rows, config)
    all_rows = list(cursors([True] * num_rows, 4, drop_last, 3))
    assert [schedule_step(step, cursor, config) for step, cursor in enumerate(all_rows, 1)] == [*range(1, planned + 1)]
    some_rows = list(cursors([row % 5 != 2 for row in range(num_rows)], 4, drop_last, 3))
    places = [schedule_step(step, cursor, config) for step, cursor in enumerate(some_rows, 1)]
    assert len(places) < planned
    assert all(earlier < later for earlier, later in pairwise(places))
    assert planned - drop_last <= places[-1] <= planned
    config.run.steps = 50
    assert schedule_step(7, some_rows[6], config) == 7


def test_a_warm_up_that_takes_the_whole_run_is_told() -> None:
    assert warmup_warning(10, 10) == (
        "warning: train.warmup_steps=10, and the run ends after step 10: its learning rate only rises, to 91% of the "
        "peak; give fewer warm-up steps, or a longer run")
    assert [warmup_warning(*steps) for steps in ((0, 1), (9, 10))] == ["", ""]


def chosen(folder: Folder) -> tuple[Manifest | None, list[Message]]:
    """The checkpoint that a start takes, and what it says."""
    said: list[Message] = []
    return covered_checkpoint(RunRecords(folder), Checkpoints(folder, 5), said.append), said


def test_a_run_goes_on_from_the_newest_checkpoint_that_its_ledger_covers(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert chosen(folder) == (None, [])
    commit(RunRecords(folder), 1, 5)
    assert chosen(folder) == (None, [Notice(f"{tmp_path} has no whole checkpoint: the run begins again, and steps 1 to "
                                            "5 of ledger.jsonl are done again")])
    for step in (4, 5):
        Checkpoints(folder, 5).seal(Manifest(step, {"row": step}, 2, "step"))
    assert chosen(folder) == (Manifest(5, {"row": 5}, 2, "step"), [])
    for step in (8, 9):
        Checkpoints(folder, 5).seal(Manifest(step, {"row": step}, 2, "step"))
    assert chosen(folder) == (Manifest(5, {"row": 5}, 2, "step"), [Notice(
        f"{tmp_path}/ledger.jsonl ends at step 5: the run goes on from the checkpoint of step 5, and those after it "
        "are deleted")])


def test_a_ledger_that_covers_no_checkpoint_is_refused_and_nothing_is_deleted(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    Checkpoints(folder, 5).seal(Manifest(4, {}, 2, "step"))
    for steps in (0, 3):
        commit(RunRecords(folder), 1, steps)
        with pytest.raises(StorageError,
                           match=rf"ledger.jsonl ends at step {steps}; the oldest checkpoint is of step 4; allowed: "):
            chosen(folder)
    assert Checkpoints(folder, 5).complete() == [4]
