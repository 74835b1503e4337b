from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow.fs import FileSystem

from dhp_ray.credentials import full_uri
from dhp_ray.storage import Folder, StorageError, check_writable
from tests.disks import fill


def test_what_cannot_be_written_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    check_writable(tmp_path / "new" / "folder" / "x")
    check_writable(tmp_path / "file")
    for place, error in ((tmp_path, IsADirectoryError), (tmp_path / "file" / "x", NotADirectoryError),
                         (tmp_path / ("x" * 300), OSError)):
        with pytest.raises(error):
            check_writable(place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_the_file_system_has_the_credentials_and_the_path_shows_none() -> None:
    files, path = Folder("s3://KEY:sec%2Fret@bucket/run?region=eu-1").place()
    assert (files.type_name, path) == ("s3", "bucket/run")
    assert files == FileSystem.from_uri("s3://KEY:sec%2Fret@bucket/run?region=eu-1")[0]


def test_what_is_written_reads_back(folder: Folder) -> None:
    folder.write("plans/step_000001.json", b"{}")
    folder.write("plans/step_000001.json", b'{"a": 1}')
    folder.write("empty", b"")
    assert folder.read("plans/step_000001.json") == b'{"a": 1}'
    assert folder.read("empty") == b""
    assert folder.exists("plans/step_000001.json")
    assert folder.exists("plans")
    assert not folder.exists("plans/step_000002.json")


def test_names_are_sorted_and_of_one_level(folder: Folder) -> None:
    assert folder.names() == []
    assert folder.names("checkpoints") == []
    for name in ("checkpoints/step_000002/manifest.json", "checkpoints/step_000001/a/b", "checkpoints/notes", "other"):
        folder.write(name, b"x")
    assert folder.names("checkpoints") == ["notes", "step_000001", "step_000002"]
    assert folder.names() == ["checkpoints", "other"]


def test_a_folder_is_listed_while_it_appears_and_goes(tmp_path: Path) -> None:
    """Each listing shows its file or nothing: never an error."""
    folder, ended = Folder(str(tmp_path)), threading.Event()

    def change() -> None:
        while not ended.is_set():
            (tmp_path / "lease").mkdir()
            (tmp_path / "lease").rmdir()

    changing = threading.Thread(target=change)
    changing.start()
    try:
        assert {tuple(folder.names("lease")) for _ in range(20_000)} == {()}
    finally:
        ended.set()
        changing.join()


def test_delete_takes_files_folders_and_nothing(folder: Folder) -> None:
    folder.write("checkpoints/step_000001/shard", b"x")
    folder.write("checkpoints/step_000002/shard", b"x")
    folder.write("file", b"x")
    folder.delete("checkpoints/step_000001")
    folder.delete("file")
    folder.delete("nothing")
    assert folder.names("checkpoints") == ["step_000002"]
    assert not folder.exists("file")


def test_of_two_that_delete_neither_fails(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))

    def delete_all(_: int) -> None:
        for file in range(2000):
            folder.delete(f"{file}")

    for file in range(2000):
        (tmp_path / f"{file}").touch()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(delete_all, range(2)))
    assert folder.names() == []


def test_files_and_folders_go_in_and_come_out(folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "weights").write_bytes(bytes(range(256)) * 5000)
    (source / "inner" / "empty").write_bytes(b"")
    folder.upload(source, "model")
    folder.upload(source / "weights", "alone/weights")
    folder.upload(source / "inner" / "empty", "alone/weights.tag")
    folder.download("model", tmp_path / "back" / "model")
    folder.download("alone/weights", tmp_path / "single" / "weights")
    assert (
        (tmp_path / "back/model/weights").read_bytes()
        == (source / "weights").read_bytes()
        == (tmp_path / "single/weights").read_bytes()
    )
    assert (tmp_path / "back/model/inner/empty").read_bytes() == b""
    assert folder.names("alone") == ["weights", "weights.tag"]


def test_upload_replaces_and_adds(folder: Folder, tmp_path: Path) -> None:
    for rank, content in enumerate((b"a", b"bb")):
        source = tmp_path / f"rank{rank}"
        source.mkdir()
        (source / f"{rank}.distcp").write_bytes(content)
        (source / "common").write_bytes(content)
        folder.upload(source, "checkpoints/step_000001")
    assert folder.names("checkpoints/step_000001") == ["0.distcp", "1.distcp", "common"]
    assert folder.read("checkpoints/step_000001/common") == b"bb"


def test_a_child_is_a_folder_inside(folder: Folder) -> None:
    child = folder.child("tensorboard")
    child.write("events", b"x")
    assert folder.names("tensorboard") == ["events"]
    assert pickle.loads(pickle.dumps(child)).read("events") == b"x"


def test_probe_leaves_nothing(folder: Folder) -> None:
    folder.probe()
    assert folder.names() == []


def test_a_missing_file_is_one_line_with_its_name(folder: Folder, tmp_path: Path) -> None:
    for attempt in (lambda: folder.read("plans/missing.json"),
                    lambda: folder.download("plans/missing.json", tmp_path / "x")):
        with pytest.raises(StorageError, match=r"plans/missing\.json") as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, OSError)


def test_the_reason_is_the_systems_own(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        Folder(str(tmp_path)).read("missing.json")
    assert str(caught.value) == f"{tmp_path}/missing.json: cannot be read: No such file or directory"


def test_an_upload_of_nothing_is_one_line(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent"):
        folder.upload(tmp_path / "absent", "x")
    assert not folder.exists("x")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(str(tmp_path))
    folder.write("cluster.json", b"old")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr("dhp_ray.storage.ROOM_PATIENCE_S", 0.3)
    with pytest.raises(StorageError, match=r"cluster\.json: cannot be written: No space left"):
        folder.write("cluster.json", b"new")
    assert os.listdir(tmp_path) == ["cluster.json"]
    assert folder.read("cluster.json") == b"old"


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    """Two processes: one replaces a file over and over, the other finds it whole each time."""
    program = ("import sys; from dhp_ray.storage import Folder; folder = Folder(sys.argv[1])\n"
               "for turn in range(60): folder.write('file', bytes([turn]) * 300_000)")
    folder = Folder(str(tmp_path))
    folder.write("file", b"\0" * 300_000)
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parent.parent)
    seen = set()
    while writer.poll() is None:
        content = folder.read("file")
        assert len(content) == 300_000
        assert len(set(content)) == 1
        seen.add(content[0])
    assert writer.returncode == 0
    assert len(seen) > 1


def test_what_a_crash_left_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / f".cluster.json.{'0' * 32}.tmp").write_bytes(b"half")
    assert Folder(str(tmp_path)).names() == []


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Folder("runs/default").local_path() == tmp_path / "runs/default"
    assert Folder("~/runs").local_path() == tmp_path / "home/runs"
    assert Folder(f"file://{tmp_path}/x").local_path() == tmp_path / "x"
    assert Folder("runs").child("a/b").local_path() == tmp_path / "runs/a/b"


@pytest.mark.parametrize("uri", ["nonsense://bucket/x", "s3://b ad/x", "s3://bucket/x?no_such_option=1"])
def test_a_bad_uri_is_one_line(uri: str) -> None:
    with pytest.raises(StorageError) as caught:
        Folder(uri)
    assert str(caught.value).startswith(uri)
    assert "\n" not in str(caught.value)


def test_credentials_open_storage_and_are_never_shown() -> None:
    folder = Folder("s3://KEY:sec%2Fret@bucket/run?region=eu-1")
    for again in (folder, pickle.loads(pickle.dumps(folder)), Folder(folder.uri)):
        assert again.uri == "s3://***@bucket/run?region=eu-1"
        assert (repr(again), repr(again.child("a"))) == ("Folder('s3://***@bucket/run?region=eu-1')",
                                                         "Folder('s3://***@bucket/run/a?region=eu-1')")
        assert full_uri(again.child("a").uri) == "s3://KEY:sec%2Fret@bucket/run/a?region=eu-1"


@pytest.mark.parametrize("uri", ["s3://KEY:sec/ret@bucket/x", "s3://KEY:sec ret\n@bucket/x",
                                 "nonsense://KEY:secret@bucket/x",
                                 "s3://KEY:secret@bucket/x?no_such_option=1"])
def test_credentials_of_a_bad_uri_are_not_shown(uri: str) -> None:
    with pytest.raises(StorageError) as caught:
        Folder(uri)
    assert str(caught.value).startswith(f"{uri.partition('KEY')[0]}***@bucket/x")
    shown = "".join(traceback.format_exception(caught.value, limit=0))
    assert not re.search("KEY|sec|ret", shown), shown


def test_names_stay_inside_the_folder(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "run"))
    for name in ("/etc/passwd", "../x", "a/../../x"):
        with pytest.raises(StorageError, match="not a name inside"):
            folder.read(name)


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"file/run") as caught:
        Folder(str(tmp_path / "file" / "run")).probe()
    assert "\n" not in str(caught.value)


def test_a_small_file_waits_for_room(small_disk: Path) -> None:
    """As after a save that filled the disk and failed: its part goes a moment later."""
    folder = Folder(str(small_disk))
    folder.write("cluster.json", b"{}")
    fill(small_disk / "part")
    waited = threading.Timer(0.5, (small_disk / "part").unlink)
    started = time.monotonic()
    waited.start()
    folder.write("cluster.json", b"{}" * 10**4)
    assert 0.4 < time.monotonic() - started < 10
    assert folder.read("cluster.json") == b"{}" * 10**4


def test_a_disk_that_stays_full_is_one_line(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp_ray.storage.ROOM_PATIENCE_S", 0.3)
    with pytest.raises(StorageError, match=r"small_disk/large: cannot be written: No space left on device"):
        Folder(str(small_disk)).write("large", b"0" * 25 * 2**20)
    assert list(small_disk.iterdir()) == []


def test_a_local_folder_with_a_question_mark_has_children(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "why?")).child("inner")
    folder.write("file", b"x")
    assert (tmp_path / "why?" / "inner" / "file").read_bytes() == b"x"
    assert str(tmp_path / "why?") in folder._full("file")
