"""Fragments: the units in which a data set is shuffled and read. One pass finds them, before any training.

A fragment of parquet is a row group; of JSON, up to 32 rows with the byte offsets of each, so that reading it
touches no other row. The pass also gives a name of its own to every row whose id is missing or taken.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dhp_ray.data.errors import DataError, first_line
from dhp_ray.schema import Data

ROWS_PER_FRAGMENT = 32
CONVERSATION_COLUMNS = ("conversations", "messages")
MEDIA_COLUMNS = ("image", "images", "video", "videos")
ROW_COLUMNS = ("id", *CONVERSATION_COLUMNS, *MEDIA_COLUMNS)
_SUFFIXES = {"llava": (".json", ".jsonl"), "parquet": (".parquet",), "synthetic": (".parquet",)}
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Rows [first_row, first_row + num_rows) of a file; `names` replaces ids, by offset within the fragment."""

    path: str
    kind: str
    first_row: int
    num_rows: int
    row_group: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    names: tuple[tuple[int, str], ...] = ()


def index_fragments(data: Data) -> list[Fragment]:
    """The fragments of `data.path`, files by name and rows in order.

    Raises:
        DataError: a file that is missing, of another form, or without the columns that are needed.
    """
    names = _Names()
    fragments: list[Fragment] = []
    for path in data_files(data):
        scan = _scan_json if data.format == "llava" else _scan_parquet
        fragments += scan(path, names)
    if not fragments:
        raise DataError(f"data.path: {data.path} holds no rows; allowed: at least one")
    return fragments


def data_files(data: Data) -> list[str]:
    """The files of `data.path`: itself, or every file of the format in that folder, by name."""
    if data.format not in _SUFFIXES:
        raise DataError(f"data.format: {data.format} is not read yet; allowed: {', '.join(_SUFFIXES)}")
    if data.sources:
        raise DataError("data.sources: mixing several sources is not there yet; allowed: one file or folder in data.path")
    if not data.path:
        raise DataError("data.path: empty; allowed: a file or a folder of files")
    path = os.path.abspath(data.path)
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        hint = "; jobs/prepare_data.py writes it" if data.format == "synthetic" else ""
        raise DataError(f"data.path: no file or folder {data.path}{hint}")
    suffixes = _SUFFIXES[data.format]
    found = sorted(name for name in os.listdir(path) if name.endswith(suffixes) and not name.startswith((".", "_")))
    if not found:
        raise DataError(f"data.path: {data.path} holds no file of the format {data.format}; allowed: names ending in {' or '.join(suffixes)}")
    return [os.path.join(path, name) for name in found]


def image_root(data: Data) -> str:
    """The folder that image names are relative to."""
    if data.image_root:
        if not os.path.isdir(data.image_root):
            raise DataError(f"data.image_root: no folder {data.image_root}")
        return os.path.realpath(data.image_root)
    path = os.path.realpath(data.path)
    return path if os.path.isdir(path) else os.path.dirname(path)


class _Names:
    """Ids that are taken. Real sets repeat some, and a ledger needs one name a row."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def claim(self, given: Any, path: str, row: int) -> str | None:
        """None where the given id can stay; else the name to use in its place."""
        wanted = None if given is None or isinstance(given, (dict, list)) else str(given)
        if wanted and wanted not in self._taken:
            self._taken.add(wanted)
            return None
        name = f"{wanted or Path(path).stem}#{row:06d}"
        while name in self._taken:
            name = f"{name}+"
        self._taken.add(name)
        return name


def _scan_json(path: str, names: _Names) -> list[Fragment]:
    if not os.path.getsize(path):
        raise DataError(f"data.path: {path} is empty; allowed: JSON or JSONL with at least one row")
    spans: list[tuple[int, int]] = []
    renamed: dict[int, str] = {}
    has_conversations = False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for row, (start, stop) in enumerate(_row_spans(text, path)):
            fields = _parse(text[start:stop], path, row)
            has_conversations = has_conversations or any(column in fields for column in CONVERSATION_COLUMNS)
            name = names.claim(fields.get("id"), path, row)
            if name:
                renamed[row] = name
            spans.append((start, stop))
    if spans and not has_conversations:
        raise DataError(f"data.path: {path}: no row has conversations; allowed: rows with id, image and conversations (or messages)")
    return [Fragment(path, "json", first, len(part), spans=tuple(part),
                     names=tuple((row - first, renamed[row]) for row in range(first, first + len(part)) if row in renamed))
            for first in range(0, len(spans), ROWS_PER_FRAGMENT) for part in [spans[first : first + ROWS_PER_FRAGMENT]]]


def _parse(text: bytes, path: str, row: int) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        if row == 0:  # a first row like this means another kind of file; a later one is a bad row, reported when it is read
            raise DataError(f"data.path: {path} is not JSON: {first_line(error)}") from None
        return {}
    if not isinstance(fields, dict):
        if row == 0:
            raise DataError(f"data.path: {path} holds {type(fields).__name__} as its first row; allowed: objects")
        return {}
    return fields


def _row_spans(text: mmap.mmap, path: str) -> Iterator[tuple[int, int]]:
    """Byte ranges [start, stop) of the rows: elements of one JSON array, or lines."""
    begin = 3 if text[:3] == b"\xef\xbb\xbf" else 0
    first = re.compile(rb"\s*(\S)").match(text, begin)
    if first is None:
        raise DataError(f"data.path: {path} is empty; allowed: JSON or JSONL with at least one row")
    if first.group(1) != b"[":
        for line in re.finditer(rb"[^\r\n]*\S[^\r\n]*", text[begin:] if begin else text):
            yield line.start() + begin, line.end() + begin
        return
    depth, start, end = 0, 0, first.end()
    for match in _STRUCTURE.finditer(text, first.start(1)):
        mark = text[match.start()]
        if mark in b"[{":
            if depth == 1:
                start = match.start()
                _check_gap(text[end:start], path, end, first_row=end == first.end())
            depth += 1
        elif mark in b"]}":
            depth -= 1
            if depth == 1:
                end = match.end()
                yield start, end
            elif depth == 0:
                _check_gap(text[end : match.start()], path, end, first_row=True)
                if text[match.end() :].strip():
                    raise DataError(f"data.path: {path} is not JSON: text after the array, at byte {match.end()}")
                return
    raise DataError(f"data.path: {path} is not JSON: the array that starts at byte {first.start(1)} does not end")


def _check_gap(gap: bytes, path: str, position: int, *, first_row: bool) -> None:
    if gap.strip() != (b"" if first_row else b","):
        raise DataError(f"data.path: {path} is not JSON: expected an object at byte {position}, found {gap.strip()[:40]!r}")


def _scan_parquet(path: str, names: _Names) -> list[Fragment]:
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(file.schema_arrow, path)
            fragments, first = [], 0
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                ids = file.read_row_group(group, columns=["id"])["id"].to_pylist() if "id" in file.schema_arrow.names else [None] * num_rows
                claimed = ((offset, names.claim(given, path, first + offset)) for offset, given in enumerate(ids))
                renamed = tuple((offset, name) for offset, name in claimed if name)
                if num_rows:
                    fragments.append(Fragment(path, "parquet", first, num_rows, row_group=group, names=renamed))
                first += num_rows
            return fragments
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data.path: {path} is not parquet: {first_line(error)}") from None


def _check_columns(schema: pa.Schema, path: str) -> None:
    present = [name for name in CONVERSATION_COLUMNS if name in schema.names]
    if not present:
        raise DataError(f"data.path: {path} has no column conversations or messages (it has {', '.join(schema.names)}); "
                        "allowed: id, image or images, video or videos, conversations or messages")
    for name in present:
        kind = schema.field(name).type
        turns = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not (turns and pa.types.is_struct(kind.value_type)) and not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
            raise DataError(f"data.path: {path}: column {name} holds {kind}; allowed: a list of structs (from and value, or role and content), or JSON text")
    for name in MEDIA_COLUMNS:
        if name in schema.names and not _holds_images(schema.field(name).type):
            raise DataError(f"data.path: {path}: column {name} holds {schema.field(name).type}; allowed: bytes, string, struct with bytes, or a list of these")


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return any(test(kind) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string, pa.types.is_null))
