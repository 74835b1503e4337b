"""Files of a run, on a local path or behind a URI (`s3://`, `gs://`, `hdfs://`, ...), through pyarrow.fs.

    Folder ... whole files: read, write atomically, list, delete, copy in and out
    SpooledLog ... one JSON object a line; appended locally, spooled and uploaded whole where storage cannot append
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp$")
"""Ending of a file that is being written; a crash may leave one behind, and no listing shows it."""


class StorageError(OSError):
    """One line for the user: which file, and what went wrong with it."""


class Folder:
    """A folder that is named by a local path or a URI; it exists once something has been written into it.

    Names are relative, with `/` between their parts. Every method raises StorageError, with the file's full name.
    A Folder can be pickled: it is its URI.
    """

    def __init__(self, uri: str) -> None:
        if "://" not in uri:
            uri = os.path.abspath(os.path.expanduser(uri))
        self.uri = uri
        self._path: str
        with _told(uri, "not a folder that storage knows"):
            self._files, self._path = fs.FileSystem.from_uri(uri) if "://" in uri else (fs.LocalFileSystem(), uri)
        self._path = self._path.rstrip("/") or "/"
        self._local = Path(self._path) if isinstance(self._files, fs.LocalFileSystem) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Folder, (self.uri,)

    def __repr__(self) -> str:
        return f"Folder({self.uri!r})"

    def local_path(self) -> Path | None:
        """Where the folder lies on this machine, or None on an object store."""
        return self._local

    def child(self, name: str) -> Folder:
        """The folder `name` inside this one."""
        base, mark, options = self.uri.partition("?")  # an object store's options follow the path: s3://bucket/runs?region=...
        return Folder(f"{base.rstrip('/')}/{_checked(name)}{mark}{options}")

    def read(self, name: str) -> bytes:
        with _told(self._full(name), "cannot be read"), self._files.open_input_stream(self._at(name)) as stream:
            return bytes(stream.read())

    def write(self, name: str, content: bytes) -> None:
        """Put the whole file in place at once: a reader, or a crash, finds the old content or the new, never a part."""
        with _told(self._full(name), "cannot be written"):
            if self._local is None:
                with self._files.open_output_stream(self._at(name)) as stream:  # an object appears when its upload is complete
                    stream.write(content)
            else:
                with _replacing(self._local / name) as temporary:
                    temporary.write_bytes(content)

    def exists(self, name: str) -> bool:
        with _told(self._full(name), "cannot be looked up"):
            return bool(self._files.get_file_info(self._at(name)).type != fs.FileType.NotFound)

    def names(self, name: str = "") -> list[str]:
        """Sorted names of the files and folders directly in folder `name`; empty when there is no such folder."""
        with _told(self._full(name), "cannot be listed"):
            found = self._files.get_file_info(fs.FileSelector(self._at(name), allow_not_found=True))
        return sorted(info.base_name for info in found if not TEMPORARY.search(info.base_name))

    def delete(self, name: str) -> None:
        """Remove the file or folder `name`; nothing happens when there is none."""
        with _told(self._full(name), "cannot be deleted"):
            kind = self._files.get_file_info(self._at(name)).type
            if kind == fs.FileType.Directory:
                self._files.delete_dir(self._at(name))
            elif kind != fs.FileType.NotFound:
                self._files.delete_file(self._at(name))

    def upload(self, local_path: str | Path, name: str) -> None:
        """Copy the local file or folder to `name`; each file appears whole, and files that are already there are replaced."""
        source = Path(local_path)
        for file, target in _pairs(source, name):
            with _told(self._full(target), f"cannot be copied from {file}"):
                if self._local is None:
                    fs.copy_files(str(file), self._at(target), fs.LocalFileSystem(), self._files)
                else:
                    with _replacing(self._local / target) as temporary:
                        shutil.copyfile(file, temporary)

    def download(self, name: str, local_path: str | Path) -> None:
        """Copy the file or folder `name` to `local_path` on this machine."""
        target = Path(local_path)
        with _told(self._full(name), f"cannot be copied to {target}"):
            if self._files.get_file_info(self._at(name)).type == fs.FileType.NotFound:
                raise FileNotFoundError("there is none")
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.copy_files(self._at(name), str(target), self._files, fs.LocalFileSystem())

    def probe(self) -> None:
        """Write a small file, read it back and delete it: raises StorageError where that fails."""
        name, content = f".probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
        self.write(name, content)
        if self.read(name) != content:
            raise StorageError(f"{self.uri}: a file that was written reads back differently")
        self.delete(name)

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{_checked(name)}" if name else self._path

    def _full(self, name: str) -> str:
        return f"{self.uri.partition('?')[0].rstrip('/')}/{name}".rstrip("/")


class SpooledLog:
    """A log of JSON objects, one a line, in `name` of a folder.

    On a local folder `append` returns when the line is on the disk. An object store cannot append: there the lines
    are spooled in a local temporary file, and `flush` uploads it whole. A last line that a crash cut short is dropped
    when the log is opened.
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
            weakref.finalize(self, self._path.unlink, missing_ok=True)
            if folder.exists(name):
                folder.download(name, self._path)
        else:
            self._path = local / name
        with _told(str(self._path), "cannot be opened"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._drop_torn_line()
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  stays open for the log's life
            _sync_folder(self._path.parent)

    def append(self, line: dict[str, Any]) -> None:
        """Add one line. Numbers that JSON does not have (NaN, infinities) become null."""
        text = json_text(line).encode() + b"\n"
        with _told(str(self._path), "cannot be written"):
            file = self._file.fileno()
            end = os.fstat(file).st_size
            try:
                if os.write(file, text) != len(text):  # one write of a whole line, so that threads' lines do not mix
                    raise OSError(errno.ENOSPC, "the disk took only a part of the line")
                if not self._spooled:
                    os.fsync(file)
            except OSError:
                os.ftruncate(file, end)  # the next line must not continue half of this one
                raise
        self._changed = True

    def lines(self) -> Iterator[dict[str, Any]]:
        """All lines, in order."""
        with _told(str(self._path), "cannot be read"), open(self._path, encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                try:
                    line = json.loads(text)
                except ValueError:
                    line = None
                if not isinstance(line, dict):
                    raise StorageError(f"{self._folder.uri}/{self.name}: line {number} is not a JSON object")
                yield line

    def truncate(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Leave only the lines that `keep` admits. The file is replaced at once, and only when a line goes."""
        lines = list(self.lines())
        kept = [line for line in lines if keep(line)]
        if len(kept) == len(lines):
            return
        with _told(str(self._path), "cannot be written"):
            self._file.close()
            with _replacing(self._path) as temporary:
                temporary.write_text("".join(json_text(line) + "\n" for line in kept), encoding="utf-8")
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  as above
        self._changed = True

    def flush(self) -> None:
        """Upload what was spooled since the last time; on a local folder there is nothing left to do."""
        if self._spooled and self._changed:
            self._folder.upload(self._path, self.name)
        self._changed = False

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _drop_torn_line(self) -> None:
        if not self._path.exists():
            return
        with open(self._path, "r+b") as file:
            end = size = file.seek(0, os.SEEK_END)
            while end > 0:  # back to the last line's end, a block at a time
                start = max(0, end - 65536)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    end = start + found + 1
                    break
                end = start
            if end < size:
                file.truncate(end)
                os.fsync(file.fileno())
                self._changed = True


def json_text(value: Any) -> str:
    """One line of strict JSON: what it has no number for (NaN, infinities) becomes null."""
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


def _pairs(source: Path, name: str) -> list[tuple[Path, str]]:
    """(local file, name in the folder) of one file, or of every file below a local folder."""
    if not source.is_dir():
        return [(source, name)]
    return [(file, f"{name}/{file.relative_to(source).as_posix()}") for file in sorted(source.rglob("*")) if file.is_file()]


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary file beside `target`, which takes its place, safe on the disk, when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk: a new file must survive a loss of power, not only its content."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and user-space file systems have no such call
            raise
    finally:
        os.close(handle)


def _checked(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise StorageError(f"{name}: not a name inside a folder; allowed: parts joined by /, without ..")
    return name.strip("/")


@contextmanager
def _told(place: str, problem: str) -> Iterator[None]:
    """Turns what pyarrow and the operating system raise into one line that names the file."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, pa.ArrowException, ValueError) as error:  # a bad URI is a ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        first = (reason.strip().splitlines() or [type(error).__name__])[0]
        raise StorageError(f"{place}: {problem}: {first}") from error
