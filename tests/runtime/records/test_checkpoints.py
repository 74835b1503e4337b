import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dhp_ray.runtime.records.checkpoints import Checkpoints, Manifest
from dhp_ray.storage import Folder, StorageError


def manifest(step: int) -> Manifest:
    return Manifest(step, {"epoch": 0, "row": step}, 3, "step")


def test_a_folder_without_a_manifest_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Folder(str(tmp_path)), keep=2)
    assert checkpoints.newest_step() == 0
    checkpoints.seal(manifest(4))
    (tmp_path / "checkpoints/step_000008").mkdir()
    (tmp_path / "checkpoints/step_000008/part").write_bytes(b"half")
    assert checkpoints.manifest(checkpoints.newest_step()) == manifest(4)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Folder(str(tmp_path)), keep=2)
    for step in (2, 4, 6):
        checkpoints.seal(manifest(step))
    assert checkpoints.complete() == [4, 6]


def test_going_on_removes_what_is_half_written_or_later(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Folder(str(tmp_path)), keep=5)
    for step in (2, 4, 6):
        checkpoints.seal(manifest(step))
    (tmp_path / "checkpoints/step_000003").mkdir()
    checkpoints.discard_after(4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000004"]


def test_what_a_failed_save_has_left_goes_with_the_next_whole_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Folder(str(tmp_path)), keep=5)
    checkpoints.seal(manifest(2))
    for step in (4, 8):
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir()
    checkpoints.seal(manifest(6))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_000002", "step_000006", "step_000008"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"step": 3}', "null"])
def test_what_is_no_manifest_is_one_line(tmp_path: Path, content: str) -> None:
    checkpoints = Checkpoints(Folder(str(tmp_path)), keep=2)
    checkpoints.seal(manifest(4))
    (tmp_path / "checkpoints/step_000004/manifest.json").write_text(content)
    with pytest.raises(StorageError,
                       match=r"checkpoints/step_000004/manifest\.json: not the manifest of a checkpoint") as caught:
        checkpoints.manifest(4)
    assert "\n" not in str(caught.value)


def test_a_file_in_the_place_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Folder(str(tmp_path)), keep=2)
    checkpoints.seal(manifest(4))
    (tmp_path / "checkpoints/step_000008").write_text("")
    assert checkpoints.manifest(checkpoints.newest_step()) == manifest(4)
    checkpoints.discard_after(4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]


def test_the_manifest_names_the_generation_whose_files_count(tmp_path: Path) -> None:
    """Files of a generation that was aborted go when the manifest stands; checkpoints of before have theirs beside the
    manifest.
    """
    checkpoints = Checkpoints(Folder(str(tmp_path)), keep=2)
    for generation in (2, 3):
        (tmp_path / f"checkpoints/step_000004/generation_{generation}").mkdir(parents=True)
    checkpoints.seal(replace(manifest(4), generation=3))
    kept = sorted(path.name for path in (tmp_path / "checkpoints/step_000004").iterdir())
    assert kept == ["generation_3", "manifest.json"]
    assert checkpoints.manifest(4).files == "checkpoints/step_000004/generation_3"
    assert manifest(4).files == "checkpoints/step_000004"


class HeldFolder(Folder):
    """A file system on which what `held` names cannot be removed: on NFS, files that somebody still has open."""

    held = ""

    def delete(self, name: str) -> None:
        if name == self.held:
            raise StorageError(f"{name}: cannot be deleted: Directory not empty")
        super().delete(name)


def test_a_folder_that_cannot_be_deleted_ends_no_run_and_is_no_checkpoint(tmp_path: Path) -> None:
    """Its manifest goes first, so that a part of it is never taken for the whole; the next save tries again."""
    folder = HeldFolder(str(tmp_path))
    checkpoints = Checkpoints(folder, keep=1)
    assert checkpoints.seal(replace(manifest(2), generation=1)) == []
    folder.held = "checkpoints/step_000002"
    for step in (4, 6):
        assert checkpoints.seal(manifest(step)) == ["checkpoints/step_000002: cannot be deleted: Directory not empty"]
        assert checkpoints.complete() == [step]
    assert checkpoints.discard_after(6) == ["checkpoints/step_000002: cannot be deleted: Directory not empty"]
    folder.held = ""
    assert checkpoints.seal(manifest(8)) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000008"]


def test_files_of_another_generation_that_cannot_be_deleted_end_no_run(tmp_path: Path) -> None:
    folder = HeldFolder(str(tmp_path))
    (tmp_path / "checkpoints/step_000004/generation_2").mkdir(parents=True)
    folder.held = "checkpoints/step_000004/generation_2"
    checkpoints = Checkpoints(folder, keep=1)
    assert checkpoints.seal(replace(manifest(4), generation=3)) == [
        "checkpoints/step_000004/generation_2: cannot be deleted: Directory not empty"
    ]
    assert checkpoints.complete() == [4]


def test_the_driver_needs_no_torch() -> None:
    code = "import sys; import dhp_ray.runtime.driver.driver; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
