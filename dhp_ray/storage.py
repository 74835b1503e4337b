"""Files of a run, on a local path or in an object store behind a URI (`s3://`, `gs://`, ...), through pyarrow.fs. Other
file systems that it reaches (`hdfs://`) show a file before it is complete: a crash may leave a run there that cannot be
resumed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from dhp_ray.credentials import MOST_OF_ERROR, concealed, full_uri, masked, shown
from dhp_ray.errors import first_line_of

TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp$")
"""Ending of a file that is being written; a crash may leave one behind, and no listing shows it."""

ROOM_PATIENCE_S = 20.0
STORAGE_TIMEOUT_S = 2 * 3600.0  # that ranks wait for one another's files; `comm.timeout_s` is about networks


class StorageError(OSError):
    """One line for the user: which file, and what went wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message, MOST_OF_ERROR))


class Folder:
    """A folder that is named by a local path or a URI; it exists once something has been written into it. Names are
    relative, with `/` between their parts. Every method raises StorageError, with the file's full name. `uri`, as which
    it is pickled, shows no credentials. `before_writing` is called before each change, and may raise StorageError.
    """

    def __init__(self, uri: str) -> None:
        full = full_uri(uri) if "://" in uri else os.path.abspath(os.path.expanduser(uri))
        self.uri: str = concealed(full)
        self.before_writing: Callable[[], None] = lambda: None
        self._path: str
        with storage_errors(self.uri, "not a folder that storage knows"):
            if "://" in full and re.search(r"\s", full):
                raise ValueError("a URI holds no spaces; allowed: %20 in their place")
            self._files, self._path = fs.FileSystem.from_uri(full) if "://" in full else (fs.LocalFileSystem(), full)
        self._path = self._path.rstrip("/") or "/"
        self._local = Path(self._path) if isinstance(self._files, fs.LocalFileSystem) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Folder, (self.uri,)

    def __repr__(self) -> str:
        return f"Folder({self.uri!r})"

    def local_path(self) -> Path | None:
        """Return where the folder is on this machine, or None on an object store."""
        return self._local

    def place(self) -> tuple[fs.FileSystem, str]:
        """Return the file system, which has the credentials, and the folder's path on it, which shows none."""
        return self._files, self._path

    def child(self, name: str) -> Folder:
        # an object store's options follow the path: s3://bucket/runs?region=...
        base, mark, options = _cut(full_uri(self.uri))
        return Folder(f"{base.rstrip('/')}/{_checked(name)}{mark}{options}")

    def read(self, name: str) -> bytes:
        with storage_errors(self._full(name), "cannot be read"):
            with self._files.open_input_stream(self._at(name)) as stream:
                return bytes(stream.read())

    def write(self, name: str, content: bytes) -> None:
        """Put the whole file in place at once: a reader, or a crash, finds the old content or the new, never a part."""
        self.before_writing()
        with storage_errors(self._full(name), "cannot be written"):
            if self._local is None:
                # an object appears when its upload is complete
                with self._files.open_output_stream(self._at(name)) as stream:
                    stream.write(content)
            else:
                retry_when_full(lambda: self._replace(name, content))

    def exists(self, name: str) -> bool:
        with storage_errors(self._full(name), "cannot be looked up"):
            return bool(self._files.get_file_info(self._at(name)).type != fs.FileType.NotFound)

    def names(self, name: str = "") -> list[str]:
        """Sorted names of the files and folders directly in folder `name`; empty when there is no such folder."""
        with storage_errors(self._full(name), "cannot be listed"):
            try:  # allow_not_found looks twice, and raises if the folder appears in between
                found = self._files.get_file_info(fs.FileSelector(self._at(name)))
            except FileNotFoundError:
                return []
        return sorted(info.base_name for info in found if not TEMPORARY.search(info.base_name))

    def delete(self, name: str) -> None:
        """Remove the file or folder `name`; nothing happens when there is none."""
        self.before_writing()
        with storage_errors(self._full(name), "cannot be deleted"):
            kind = self._files.get_file_info(self._at(name)).type
            if kind == fs.FileType.Directory:
                self._files.delete_dir(self._at(name))
            elif kind != fs.FileType.NotFound:
                with suppress(FileNotFoundError):  # somebody else deletes it
                    self._files.delete_file(self._at(name))

    def upload(self, local_path: str | Path, name: str) -> None:
        """Copy the local file or folder to `name`; each file appears whole, and files already there are replaced."""
        self.before_writing()
        source = Path(local_path)
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if file.is_dir():
                continue
            target = f"{name}/{file.relative_to(source).as_posix()}" if file != source else name
            with storage_errors(self._full(target), f"cannot be copied from {file}"):
                if self._local is None:
                    fs.copy_files(str(file), self._at(target), fs.LocalFileSystem(), self._files)
                else:
                    with replacing(self._local / target) as temporary:
                        shutil.copyfile(file, temporary)

    def download(self, name: str, local_path: str | Path) -> None:
        target = Path(local_path)
        with storage_errors(self._full(name), f"cannot be copied to {target}"):
            if self._files.get_file_info(self._at(name)).type == fs.FileType.NotFound:
                raise FileNotFoundError("there is none")
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.copy_files(self._at(name), str(target), self._files, fs.LocalFileSystem())

    def probe(self) -> None:
        """Write a small file, read it back and delete it: raises StorageError if that fails."""
        name, content = f".probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
        self.write(name, content)
        if self.read(name) != content:
            raise StorageError(f"{self.uri}: a file that was written reads back differently")
        self.delete(name)

    def _replace(self, name: str, content: bytes) -> None:
        assert self._local is not None
        with replacing(self._local / name) as temporary:
            temporary.write_bytes(content)

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{_checked(name)}" if name else self._path

    def _full(self, name: str) -> str:
        return f"{_cut(self.uri)[0].rstrip('/')}/{name}".rstrip("/")


def _cut(uri: str) -> tuple[str, str, str]:
    """A URI before its options, the question mark, and the options; a local path may have question marks of its own."""
    return uri.partition("?") if "://" in uri else (uri, "", "")


def check_writable(file: Path) -> None:
    """Raise OSError if a local file cannot be written, before the work for it; leaves nothing behind."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if file.exists() and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    folder = file.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


def retry_when_full(write: Callable[[], None]) -> None:
    """Write something small, and wait for room if there is none: a save that fills the disk frees it."""
    deadline = time.monotonic() + ROOM_PATIENCE_S
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def append_whole(file: int, content: bytes) -> None:
    """Add bytes to the end of an open file, all or none: what follows must not continue half a line."""
    end = os.fstat(file).st_size
    try:
        done = os.write(file, content)  # in one write, so that writes of several threads do not mix
        while done < len(content):
            done += os.write(file, content[done:])  # the disk took only a part: this raises why, or takes the rest
    except OSError:
        os.ftruncate(file, end)
        raise


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary file; if the block ends without an error, it is synced and replaces `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk: a new file must survive a loss of power, not only its content."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some network and user-space file systems have no such call
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _checked(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise StorageError(f"{name}: not a name inside a folder; allowed: parts joined by /, without ..")
    return name.strip("/")


@contextmanager
def storage_errors(place: str, problem: str) -> Iterator[None]:
    """Turn what pyarrow and the operating system raise into one line that names the file."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, pa.ArrowException, ValueError) as error:  # a bad URI is a ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        first = first_line_of(reason) or type(error).__name__
        first = re.sub(r"^.*Detail: \[errno \d+\] ", "", first)  # pyarrow names the file once more, and then the reason
        raise StorageError(f"{place}: {problem}: {masked(first)}") from None  # the cause would show the whole URI
