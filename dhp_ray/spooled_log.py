"""Logs of JSON objects, one per line: appended if the storage can append, else spooled here and uploaded whole."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from dhp_ray.storage import Folder, StorageError, append_whole, replacing, retry_when_full, storage_errors, sync_folder

UPLOADING_SHARE = 0.05  # the most of the time that uploads may take, beside those before a checkpoint is sealed


class UploadTimer:
    """Tells when files that grow are to be uploaded again: after `interval_s`, or later if uploads would take more than
    UPLOADING_SHARE of the time: a ledger may have gigabytes.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._ended_s, self._took_s = monotonic(), 0.0

    @property
    def due(self) -> bool:
        return monotonic() - self._ended_s > max(self.interval_s, self._took_s / UPLOADING_SHARE)

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Put this around an upload of all files. How long one takes is known from those that were due."""
        begun_s, due = monotonic(), self.due
        yield
        self._ended_s = monotonic()
        if due:
            self._took_s = self._ended_s - begun_s


class SpooledLog:
    """A log of JSON objects, one per line, in `name` of a folder. On a local folder a line is on the disk when `append`
    returns; else lines are spooled in a temporary file, which `flush` uploads whole. A last line that a crash cut short
    is dropped when the log is opened.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self.name = name
        self._folder = folder
        local = folder.local_path()
        self._spooled = local is None
        self._changed = False
        if local is None:
            handle, path = tempfile.mkstemp(prefix="dhp_ray_", suffix=f"_{Path(name).name}")
            os.close(handle)
            self._path = Path(path)
            self._remove = weakref.finalize(self, self._path.unlink, missing_ok=True)
            if folder.exists(name):
                folder.download(name, self._path)
        else:
            self._path = local / name
        with storage_errors(str(self._path), "cannot be opened"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._drop_torn_line()
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  stays open for the log's life
            sync_folder(self._path.parent)

    def append(self, line: dict[str, Any]) -> None:
        """Add one line. Numbers that JSON does not have (NaN, infinities) become null."""
        text = json_text(line).encode() + b"\n"
        if not self._spooled:
            self._folder.before_writing()
        with storage_errors(str(self._path), "cannot be written"):
            retry_when_full(lambda: self._add(text))
        self._changed = True

    def lines(self) -> Iterator[dict[str, Any]]:
        with storage_errors(str(self._path), "cannot be read"), open(self._path, "rb") as file:
            for number, text in enumerate(file, start=1):
                yield self._object(text, f"line {number}")

    def last_lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The lines from the last one on backwards, each with the byte that it begins at; reads no further."""
        with storage_errors(str(self._path), "cannot be read"), mapped(self._path) as file:
            for begin, text in lines_backwards(file):
                yield begin, self._object(text, f"the line at byte {begin}")

    def truncate(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the lines behind the last one for which `keep` is True; only they are parsed. The file is always
        replaced: a process that still has it open, and must not write any more, cannot reach the new one.
        """
        if not self._spooled:
            self._folder.before_writing()
        with storage_errors(str(self._path), "cannot be written"):
            size = end = self._path.stat().st_size
            for begin, line in self.last_lines():
                if keep(line):
                    break
                end = begin
            with replacing(self._path) as temporary:
                shutil.copyfile(self._path, temporary)
                os.truncate(temporary, end)
            self._file.close()
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  as above
        self._changed = self._changed or end != size

    def flush(self) -> None:
        """Upload what was spooled since the last time; on a local folder there is nothing left to do."""
        if self._spooled and self._changed:
            self._folder.upload(self._path, self.name)
        self._changed = False

    def close(self) -> None:
        """Flush; the log is not used any more."""
        self.flush()
        self._file.close()
        if self._spooled:
            self._remove()

    def _object(self, text: bytes, which: str) -> dict[str, Any]:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise StorageError(f"{self._folder.uri}/{self.name}: {which} is not a JSON object")
        return line

    def _add(self, text: bytes) -> None:
        file = self._file.fileno()
        end = os.fstat(file).st_size
        append_whole(file, text)
        if not self._spooled:
            try:
                os.fsync(file)
            except OSError:
                os.ftruncate(file, end)  # the line counts as not written
                raise

    def _drop_torn_line(self) -> None:
        if not self._path.exists():
            return
        with mapped(self._path) as text:
            size, end = len(text), text.rfind(b"\n") + 1
        if end < size:
            with open(self._path, "r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())
                self._changed = True


@contextmanager
def mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    """A file's bytes, of which only what is looked at is read."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:  # cannot be mapped
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            yield text


def lines_backwards(text: bytes | mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """The whole lines, the last one first, each with the byte that it begins at."""
    end = text.rfind(b"\n")
    while end >= 0:
        begin = text.rfind(b"\n", 0, end) + 1
        yield begin, text[begin:end]
        end = begin - 1


def last_line(folder: Folder, name: str) -> bytes:
    """The last whole line of a log, empty if it has none. Of a file on this machine only the end is read."""
    if not folder.exists(name):
        return b""
    local = folder.local_path()
    if local is None:
        return next(lines_backwards(folder.read(name)), (0, b""))[1]
    with storage_errors(str(local / name), "cannot be read"), mapped(local / name) as text:
        return next(lines_backwards(text), (0, b""))[1]


def json_text(value: Any) -> str:
    """Return one line of strict JSON: numbers that it does not have (NaN, infinities) become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and value - value != 0.0 else value
