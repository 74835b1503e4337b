"""Fragments: the units in which a data set is shuffled and read; and their table, made once for a data set and kept on disk.

The table is an Arrow file that is mapped, not read: a process that uses it holds the rows that it touches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa

FORM = 2  # raised when the same files would give another table
_SCHEMA = pa.schema([
    ("file", pa.int32()), ("first_row", pa.int64()), ("num_rows", pa.int32()), ("row_group", pa.int32()),
    ("starts", pa.list_(pa.int64())), ("stops", pa.list_(pa.int64())),
    ("renamed", pa.list_(pa.int32())), ("names", pa.list_(pa.string()))])


@dataclass(frozen=True, slots=True)
class Fragment:
    """Rows [first_row, first_row + num_rows) of a file; `names` replaces ids, by offset within the fragment.

    json, tar: `spans` are the rows' byte ranges. parquet: the rows are those of `row_group`. arrow: `spans` is the byte
    range of a record batch, and `row_group` the place in it of the first row.
    """

    path: str
    kind: str
    first_row: int
    num_rows: int
    row_group: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    names: tuple[tuple[int, str], ...] = ()


class Fragments(Sequence[Fragment]):
    """The fragments of a data set, in the order of its files and rows."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._files: list[tuple[str, str]] = [(path, kind) for path, kind in json.loads(table.schema.metadata[b"files"])]
        self.sizes: np.ndarray = np.asarray(table["num_rows"], np.int64)
        """(number of fragments,): rows of each."""

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, place: int) -> Fragment: ...
    @overload
    def __getitem__(self, place: slice) -> list[Fragment]: ...
    def __getitem__(self, place: int | slice) -> Fragment | list[Fragment]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        row = self._table.slice(range(len(self))[place], 1).to_pylist()[0]
        path, kind = self._files[row["file"]]
        return Fragment(path, kind, row["first_row"], row["num_rows"], row["row_group"], tuple(zip(row["starts"], row["stops"])),
                        tuple(zip(row["renamed"], row["names"])))

    @property
    def num_rows(self) -> int:
        return int(self.sizes.sum())


class FragmentWriter:
    """Collects fragments in a compact form."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], int] = {}
        self._numbers = {name: array("q") for name in ("file", "first_row", "num_rows", "row_group", "starts", "stops", "renamed")}
        self._names: list[str] = []
        self._spans, self._renames = array("q", [0]), array("q", [0])

    def add(self, fragment: Fragment) -> None:
        file = self._files.setdefault((fragment.path, fragment.kind), len(self._files))
        for name, value in (("file", file), ("first_row", fragment.first_row), ("num_rows", fragment.num_rows), ("row_group", fragment.row_group)):
            self._numbers[name].append(value)
        for start, stop in fragment.spans:
            self._numbers["starts"].append(start)
            self._numbers["stops"].append(stop)
        for offset, renamed in fragment.names:
            self._numbers["renamed"].append(offset)
            self._names.append(renamed)
        self._spans.append(len(self._numbers["starts"]))
        self._renames.append(len(self._names))

    def table(self) -> pa.Table:
        plain = {name: np.frombuffer(values, np.int64) if values else np.zeros(0, np.int64) for name, values in self._numbers.items()}
        spans, renames = pa.array(np.frombuffer(self._spans, np.int64), pa.int32()), pa.array(np.frombuffer(self._renames, np.int64), pa.int32())
        columns = [pa.array(plain[name], _SCHEMA.field(name).type) for name in ("file", "first_row", "num_rows", "row_group")]
        columns += [pa.ListArray.from_arrays(spans, pa.array(plain[name])) for name in ("starts", "stops")]
        columns += [pa.ListArray.from_arrays(renames, pa.array(plain["renamed"], pa.int32())),
                    pa.ListArray.from_arrays(renames, pa.array(self._names, pa.string()))]
        return pa.table(columns, schema=_SCHEMA.with_metadata({"files": json.dumps(list(self._files))}))


def cache_folder() -> Path:
    """Where tables are kept: DHP_RAY_CACHE, or dhp_ray in the user's cache folder."""
    named = os.environ.get("DHP_RAY_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dhp_ray"


def cache_key(files: Sequence[tuple[str, str]]) -> str:
    """A name for these files (path, kind) as they are now: it changes with their sizes and times."""
    state = [(path, kind, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path, kind in files]
    return hashlib.sha256(json.dumps([FORM, state]).encode()).hexdigest()[:32]


def load(key: str) -> pa.Table | None:
    """The table kept under a key, mapped; None when there is none that can be used."""
    path = cache_folder() / f"{key}.arrow"
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowException):
        return None
    return table if table.schema.equals(_SCHEMA) and b"files" in (table.schema.metadata or {}) else None


def store(key: str, table: pa.Table) -> None:
    """Keep a table; where it cannot be written the next start has to make it again."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix=f".{key}.", dir=folder)
        os.close(handle)
        try:
            with pa.OSFile(unfinished, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table.combine_chunks())
            os.replace(unfinished, folder / f"{key}.arrow")
        except BaseException:
            os.unlink(unfinished)
            raise
    except OSError as error:
        logging.getLogger(__name__).warning("the index of the data cannot be kept in %s: %s", folder, error.strerror)
