from pathlib import Path

from dhp_ray.runtime.checkpoints import Checkpoints, Manifest
from dhp_ray.storage import Folder


def manifest(step: int) -> Manifest:
    return Manifest(step, {"epoch": 0, "row": step}, 3, "step")


def test_a_folder_without_a_manifest_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Folder(str(tmp_path)), keep=2)
    assert checkpoints.newest() is None
    checkpoints.seal(manifest(4))
    (tmp_path / "checkpoints/step_000008").mkdir()
    (tmp_path / "checkpoints/step_000008/part").write_bytes(b"half")
    assert checkpoints.newest() == manifest(4)


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
