"""The index of a data set: one pass over its files finds the fragments, before any training, and is kept for later starts.

A fragment of parquet is a row group, or up to 256 rows of it; of JSON and of tar shards, up to 32 rows with their byte ranges, so
that reading it touches no other row; of an Arrow stream, up to 32 rows of a record batch. The pass also gives a name of its own to every
row whose id is missing or taken.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dhp_ray.data import fragments as kept
from dhp_ray.data.errors import DataError, description, first_line
from dhp_ray.data.fragments import Fragment, Fragments, FragmentWriter
from dhp_ray.data.names import Names
from dhp_ray.data.saved_sets import arrow_schema, saved_files, scan_arrow
from dhp_ray.data.shards import scan_tar
from dhp_ray.schema import Data

ROWS_PER_FRAGMENT = 32
ROWS_OF_ROW_GROUP = 256
"""A fragment's most rows in parquet, where reading a few rows means to read past those before them."""
CONVERSATION_COLUMNS = ("conversations", "messages")
MEDIA_COLUMNS = ("image", "images", "video", "videos")
ROW_COLUMNS = ("id", *CONVERSATION_COLUMNS, "tools", *MEDIA_COLUMNS)
KEPT_FROM_BYTES = 8 * 2**20
"""The index of fewer bytes of data is made at every start: that is as fast as finding the one that was kept."""
_SUFFIXES = {"llava": (".json", ".jsonl"), "parquet": (".parquet",), "synthetic": (".parquet",), "webdataset": (".tar",),
             "huggingface": (".arrow", ".parquet")}
_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".tar": "tar", ".arrow": "arrow"}
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)

Progress = Callable[[int, int], None]
"""Called with the bytes done and all bytes."""


def index_fragments(data: Data, progress: Progress = lambda done, total: None) -> Fragments:
    """The fragments of `data.path`, files by name and rows in order. Kept (data/fragments.py) where there is much to read.

    Raises:
        DataError: a file that is missing, of another form, or without the columns that are needed.
    """
    files = _files(data)
    sizes = [os.path.getsize(path) for path, _ in files]
    key = kept.cache_key(files) if sum(sizes) >= KEPT_FROM_BYTES else ""
    table = kept.load(key) if key else None
    if table is None:
        names, writer, done = Names(), FragmentWriter(), 0
        for (path, kind), size in zip(files, sizes):
            for fragment in _scanned(path, kind, names, _after(done, sum(sizes), progress)):
                writer.add(fragment)
            done += size
        table = writer.table()
        if key:
            table = kept.store(key, table)
    found = Fragments(table)
    if not len(found):
        raise _no_rows(data)
    return found


def check_form(data: Data) -> None:
    """Refuse what the first rows tell: that there are none, that they are of another form, or that they lack columns. Milliseconds, whatever the size.

    Raises:
        DataError: as `index_fragments`.
    """
    image_root(data)
    for path, kind in _files(data):
        if list(islice(_scanned(path, kind, Names(), lambda position: None), 2)):
            return
    raise _no_rows(data)


def _files(data: Data) -> list[tuple[str, str]]:
    """The files of `data.path`, and the kind of each."""
    return [(path, _KINDS[os.path.splitext(path)[1]]) for path in data_files(data)]


def _scanned(path: str, kind: str, names: Names, progress: Callable[[int], None]) -> Iterator[Fragment]:
    """The fragments of one file."""
    try:
        yield from _SCANS[kind](path, names, progress)
    except DataError:
        raise
    except Exception as error:  # foreign bytes make readers raise errors of many kinds
        raise DataError(f"data.path: {path} cannot be read: {description(error)}") from None


def _no_rows(data: Data) -> DataError:
    return DataError(f"data.path: {data.path} holds no rows; allowed: at least one")


def _after(done: int, total: int, progress: Progress) -> Callable[[int], None]:
    return lambda position: progress(done + position, total)


def sources_of(data: Data) -> list[Data]:
    """The data itself, or each of `data.sources` as if it were all the data."""
    return [replace(data, path=source.path, format=source.format or data.format, sources=[]) for source in data.sources] or [data]


def held_out(data: Data, path: str) -> Data:
    """The data of `eval.path`: in the form of the training data, from one place."""
    return replace(data, path=path, sources=[])


def data_files(data: Data) -> list[str]:
    """The files of `data.path`: itself, or every file of the format in that folder, by name."""
    if not data.path:
        raise DataError("data.path: empty; allowed: a file or a folder of files")
    path = os.path.abspath(data.path)
    if os.path.isfile(path):
        if os.path.splitext(path)[1] not in _SUFFIXES[data.format]:
            raise DataError(f"data.path: {data.path} is no file of the format {data.format}; allowed: a name ending in "
                            f"{' or '.join(_SUFFIXES[data.format])}")
        return [path]
    if not os.path.isdir(path):
        hint = "; jobs/prepare_data.py writes it" if data.format == "synthetic" else ""
        raise DataError(f"data.path: no file or folder {data.path}{hint}")
    if data.format == "huggingface":
        return saved_files(path)
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


def _scan_json(path: str, names: Names, progress: Callable[[int], None]) -> Iterator[Fragment]:
    if not os.path.getsize(path):
        raise DataError(f"data.path: {path} is empty; allowed: JSON or JSONL with at least one row")
    has_conversations, num_rows = False, 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:

        def rows() -> Iterator[tuple[Any, tuple[int, int]]]:
            nonlocal has_conversations, num_rows
            for row, (start, stop) in enumerate(_row_spans(text, path)):
                fields = _parse(text[start:stop], path, row)
                has_conversations = has_conversations or any(column in fields for column in CONVERSATION_COLUMNS)
                num_rows = row + 1
                yield fields.get("id"), (start, stop)
                progress(stop)

        yield from _in_parts(path, "json", rows(), names)
    if num_rows and not has_conversations:
        raise DataError(f"data.path: {path}: no row has conversations; allowed: rows with id, image and conversations (or messages)")


def _in_parts(path: str, kind: str, rows: Iterator[tuple[Any, tuple[int, int]]], names: Names) -> Iterator[Fragment]:
    """Fragments of rows that are given by (id, byte range)."""
    first = 0
    while part := list(islice(rows, ROWS_PER_FRAGMENT)):
        renamed = _renamed((given for given, _ in part), names, path, first)
        spans = tuple(span for _, span in part)
        yield Fragment(path, kind, first, len(part), sum(stop - start for start, stop in spans), spans=spans, names=renamed)
        first += len(part)


def _renamed(given: Iterable[Any], names: Names, path: str, first: int) -> tuple[tuple[int, str], ...]:
    claimed = ((offset, names.claim(name, path, first + offset)) for offset, name in enumerate(given))
    return tuple((offset, name) for offset, name in claimed if name)


def _scan_tar(path: str, names: Names, progress: Callable[[int], None]) -> Iterator[Fragment]:
    rows = ((key, (start, stop)) for key, start, stop in scan_tar(path, progress))
    yield from _in_parts(path, "tar", rows, names)


def _scan_arrow(path: str, names: Names, progress: Callable[[int], None]) -> Iterator[Fragment]:
    _check_columns(arrow_schema(path), path)
    first = 0
    for start, stop, batch in scan_arrow(path, progress):
        # The file is mapped: offsets that lead out of it would be followed.
        batch.select([name for name in batch.schema.names if name == "id"]).validate(full=True)
        for offset in range(0, batch.num_rows, ROWS_PER_FRAGMENT):
            part = batch.slice(offset, ROWS_PER_FRAGMENT)
            ids = part["id"].to_pylist() if "id" in part.schema.names else [None] * part.num_rows
            yield Fragment(path, "arrow", first, part.num_rows, (stop - start) * part.num_rows // batch.num_rows, 0, offset, ((start, stop),),
                           _renamed(ids, names, path, first))
            first += part.num_rows


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
        for line in re.compile(rb"[^\r\n]*\S[^\r\n]*").finditer(text, begin):
            yield line.span()
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


def _scan_parquet(path: str, names: Names, progress: Callable[[int], None]) -> Iterator[Fragment]:
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(file.schema_arrow, path)
            first = 0
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                ids = file.read_row_group(group, columns=["id"])["id"] if "id" in file.schema_arrow.names else pa.nulls(about.num_rows)
                parts = max(1, -(-about.num_rows // ROWS_OF_ROW_GROUP))
                ends = [about.num_rows * (part + 1) // parts for part in range(parts)]  # of almost the same size
                for offset, end in zip([0, *ends], ends):
                    if end > offset:
                        renamed = _renamed(ids[offset:end].to_pylist(), names, path, first + offset)
                        num_bytes = about.total_byte_size * (end - offset) // about.num_rows
                        yield Fragment(path, "parquet", first + offset, end - offset, num_bytes, group, offset, names=renamed)
                first += about.num_rows
                progress(os.path.getsize(path) * (group + 1) // file.num_row_groups)
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


_SCANS: dict[str, Callable[[str, Names, Callable[[int], None]], Iterator[Fragment]]] = {
    "json": _scan_json, "parquet": _scan_parquet, "tar": _scan_tar, "arrow": _scan_arrow}
