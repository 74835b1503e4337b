"""Fragments, the units in which a data set is shuffled and read, and their table, which is made once for a data set and
kept on disk.

The table is an Arrow file that is mapped, not read: a process that uses it holds only the rows that it touches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dhp_ray.credentials import masked
from dhp_ray.data.errors import DataError, description
from dhp_ray.user_cache import cache_folders, keep

FORM = 5  # to be raised when the same files give another table
MOST_BYTES = 256 * 2**20  # about the most of a block, and of a fragment but for parquet; a single row may have more

_SCHEMA = pa.schema([
    ("file", pa.int32()), ("first_row", pa.int64()), ("num_rows", pa.int32()), ("num_bytes", pa.int64()),
    ("row_group", pa.int32()), ("offset", pa.int64()),
    ("starts", pa.list_(pa.int64())), ("stops", pa.list_(pa.int64())),
    ("renamed", pa.list_(pa.int32())), ("names", pa.list_(pa.large_string()))])
AT_ONCE = 128  # the fragments that are held as Python objects until they are packed
_PLAIN = ("file", "first_row", "num_rows", "num_bytes", "row_group", "offset")
SAMPLES, SAMPLE_BYTES = 4, 4096  # the places in a file, evenly spread, and the bytes at each that a digest reads
MAX_LOAD = 2 / 3
MOST_CHARACTERS = 200
# What an id in a log line must not have: what a terminal obeys, line ends, what reorders text, and half characters.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Fragment:
    """Rows [first_row, first_row + num_rows) of a file; `names` replaces ids, by offset. `spans`: the rows' byte ranges
    (json, tar), or the record batch's (arrow). parquet, arrow: rows of `row_group` or batch from `offset` on.
    """

    path: str
    kind: str
    first_row: int
    num_rows: int
    num_bytes: int = 0
    row_group: int = 0
    offset: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    names: tuple[tuple[int, str], ...] = ()


class Fragments:
    """The fragments of a data set, in the order of its files and rows."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        files = json.loads(table.schema.metadata[b"files"])
        self._files: list[tuple[str, str]] = [(path, kind) for path, kind in files]
        self.sizes: np.ndarray = np.asarray(table["num_rows"], np.int64)
        """(number of fragments,): the number of rows of each."""
        self.num_bytes: np.ndarray = np.asarray(table["num_bytes"], np.int64)
        """(number of fragments,): the stored bytes of each."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, place: int) -> Fragment:
        row = self._table.slice(range(len(self))[place], 1).to_pylist()[0]
        path, kind = self._files[row["file"]]
        return Fragment(path, kind, **{name: row[name] for name in _PLAIN[1:]},
                        spans=tuple(zip(row["starts"], row["stops"])),
                        names=tuple(zip(row["renamed"], row["names"])))

    def __iter__(self) -> Iterator[Fragment]:
        return map(self.__getitem__, range(len(self)))

    @property
    def num_rows(self) -> int:
        return int(self.sizes.sum())

    def largest_row_group(self) -> tuple[str, int]:
        """The parquet file with the row group of the most rows, and their number, or 0."""
        file = np.asarray(self._table["file"])
        of_parquet = np.array([kind == "parquet" for _, kind in self._files])[file]
        num_rows = np.where(of_parquet, np.asarray(self._table["offset"]) + self.sizes, 0)
        largest = int(num_rows.argmax())
        return self._files[file[largest]][0], int(num_rows[largest])

    @cached_property
    def digest(self) -> int:
        """Tells whether rows are where they were: of names, sizes and samples of files. DataError: one is gone."""
        digest = hashlib.blake2b(digest_size=6)  # small enough for any reader of JSON
        for name in _PLAIN:
            digest.update(np.asarray(self._table[name], np.int64).tobytes())
        for name in ("starts", "stops"):
            for rows in self._table[name].chunks:
                digest.update(np.asarray(rows.flatten(), np.int64).tobytes())
        for path, _ in self._files:
            try:
                with open(path, "rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    digest.update(json.dumps([os.path.basename(path), size]).encode())
                    for place in range(SAMPLES):
                        file.seek(max(0, size - SAMPLE_BYTES) * place // (SAMPLES - 1))
                        digest.update(file.read(SAMPLE_BYTES))
            except OSError as error:
                raise DataError(f"data.path: {path} cannot be read: {description(error)}") from None
        return int.from_bytes(digest.digest())


def packed(fragments: Iterable[Fragment]) -> pa.Table:
    files: dict[tuple[str, str], int] = {}
    rows = ({"file": files.setdefault((fragment.path, fragment.kind), len(files)),
             **{name: getattr(fragment, name) for name in _PLAIN[1:]},
             "starts": [start for start, _ in fragment.spans], "stops": [stop for _, stop in fragment.spans],
             "renamed": [offset for offset, _ in fragment.names], "names": [name for _, name in fragment.names]}
            for fragment in fragments)
    batches = []
    while at_once := list(islice(rows, AT_ONCE)):
        batches.append(pa.RecordBatch.from_pylist(at_once, _SCHEMA))
    table = pa.Table.from_batches(batches, _SCHEMA).combine_chunks()
    return table.replace_schema_metadata({"files": json.dumps(list(files))})


def cache_key(files: Sequence[tuple[str, str]]) -> str:
    """A key for these files (path, kind) in their present state: it changes with their sizes and modification times."""
    state = [(path, kind, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path, kind in files]
    return hashlib.sha256(json.dumps([FORM, state]).encode()).hexdigest()[:32]


def load(key: str) -> pa.Table | None:
    """The table stored under a key, mapped; None if there is no usable one."""
    for folder in cache_folders():
        try:
            table = pa.ipc.open_file(pa.memory_map(str(folder / f"{key}.arrow"))).read_all()
        except (OSError, pa.ArrowException):
            continue
        if table.schema.equals(_SCHEMA) and b"files" in (table.schema.metadata or {}):
            return table
    return None


def store(key: str, table: pa.Table) -> pa.Table:
    """Store a table; returns it mapped, or as it is if it cannot be written."""
    def write(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    refused = keep(f"{key}.arrow", write)
    if refused:
        logging.getLogger(__name__).warning("the index of the data cannot be kept in %s", refused)
        return table
    return load(key) or table


class UniqueIds:
    """The ids that are taken, as 64-bit hashes: data sets repeat some, but a ledger needs a name for each row."""

    def __init__(self) -> None:
        self._taken = HashSet()

    def claim(self, given: Any, path: str, row: int) -> str | None:
        """Return None if the given id can stay, else the name that replaces it."""
        wanted = None if given is None or isinstance(given, (dict, list)) else str(given)
        if wanted and (len(wanted) > MOST_CHARACTERS or _UNFIT.search(wanted) or masked(wanted) != wanted):
            wanted = None
        if wanted and self._taken.add(_hash(wanted)):
            return None
        name = numbered(wanted or Path(path).stem, row)
        while not self._taken.add(_hash(name)):
            name = f"{name}+"
        return name

    def rename(self, given: Iterable[Any], path: str, first: int) -> tuple[tuple[int, str], ...]:
        """(offset, name) of the rows whose given id is missing or taken; `first`: the first row's number."""
        claimed = ((offset, self.claim(name, path, first + offset)) for offset, name in enumerate(given))
        return tuple((offset, name) for offset, name in claimed if name)


def numbered(name: str, row: int) -> str:
    """The name of a row that has none, from another row's or a file's, of which the end stays."""
    number = f"#{row:06d}"
    return _UNFIT.sub("?", name)[len(number) - MOST_CHARACTERS:] + number


class HashSet:
    """Numbers from 1 to 2**64 - 1, 8 bytes a slot (linear probing); a Python set takes about a hundred an id."""

    def __init__(self) -> None:
        self._slots, self._count = array("Q", bytes(8 * 2**10)), 0

    def add(self, number: int) -> bool:
        """Add a number; returns whether it is new."""
        slots, mask = self._slots, len(self._slots) - 1
        slot = number & mask
        while (found := slots[slot]) != 0:
            if found == number:
                return False
            slot = (slot + 1) & mask
        slots[slot] = number
        self._count += 1
        if self._count > MAX_LOAD * len(slots):
            self._slots, self._count = array("Q", bytes(8)) * (2 * len(slots)), 0
            for known in filter(None, slots):
                self.add(known)
        return True


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()) or 1
