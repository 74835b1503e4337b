"""Logs that are cut back to a step on an object store, where something may fail between two uploads."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp_ray.runtime.records.run_records import RunRecords
from dhp_ray.storage import Folder, StorageError
from tests.runtime.records.test_run_records import commit, open_records


class FarFolder(Folder):
    """An object store, which fails to take the files that `refuses` names."""

    refuses: tuple[str, ...] = ()

    def local_path(self) -> Path | None:
        return None

    def upload(self, source: Path, name: str) -> None:
        if name in self.refuses:
            raise StorageError(f"{name}: cannot be written")
        super().upload(source, name)


@pytest.mark.parametrize("refused", ["ledger.jsonl", "metrics.jsonl", "skipped.jsonl"])
def test_an_upload_that_fails_leaves_a_run_that_can_be_resumed(tmp_path: Path, refused: str) -> None:
    """The metrics may have more lines than the ledger, never fewer."""
    records = RunRecords(FarFolder(str(tmp_path)))
    for step in range(1, 7):
        records.skip(f"bad{step}", "unreadable", step)
    commit(records, 1, 6)
    records.flush()
    records.folder.refuses = (refused,)  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match="cannot be written"):
        records.truncate(4)
    again = RunRecords(FarFolder(str(tmp_path)))
    assert again.last_step in (4, 6)
    again.truncate(4)
    commit(again, 5, 5)
    again.close()
    assert open_records(tmp_path).last_step == 5


def test_plans_are_cut_by_their_steps_and_not_by_their_names(tmp_path: Path) -> None:
    """`step_1000000.json` comes before `step_999999.json`."""
    records = open_records(tmp_path)
    (tmp_path / "plans").mkdir()
    for step in (1, 2, 999_999, 1_000_000):
        records.plan(step, {"groups": []})
    commit(records, 1, 3)
    records.truncate(2)
    assert sorted(path.name for path in (tmp_path / "plans").iterdir()) == ["step_000001.json", "step_000002.json"]


def test_a_log_that_is_closed_leaves_nothing_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    records = RunRecords(FarFolder(str(tmp_path / "run")))
    commit(records, 1, 2)
    assert len(list((tmp_path / "spool").iterdir())) == 4
    records.close()
    assert list((tmp_path / "spool").iterdir()) == []
    assert open_records(tmp_path / "run").last_step == 2
