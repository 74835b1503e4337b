"""Data sets on disk in the form of Hugging Face's `datasets`: folders of Arrow streams from `save_to_disk`, and folders
of parquet. A record batch is found by its byte range and mapped, so a few of its rows cost only what they take
themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from dhp_ray.data.errors import DataError
from dhp_ray.data.formats.rows import (
    ROW_COLUMNS,
    ROWS_PER_FRAGMENT,
    TEXT_COLUMNS,
    Row,
    check_columns,
    check_unchanged,
    given_ids,
    read_row,
)
from dhp_ray.data.fragments import MOST_BYTES, Fragment, UniqueIds
from dhp_ray.errors import first_line
from dhp_ray.json_object import json_object

SUFFIXES = (".arrow",)


def saved_files(path: str) -> list[str]:
    """The files of a saved set, in order. DataError: it has several splits, an index of rows, or no file."""
    described = Path(path, "dataset_dict.json")
    if os.path.exists(described):
        names = [str(name) for name in json_object(described, "data.path", DataError).get("splits", [])]
        if len(names) != 1:
            raise DataError(f"data.path: {path} holds the splits {', '.join(names)}; allowed: one of their folders")
        return saved_files(os.path.join(path, names[0]))
    described = Path(path, "state.json")
    if os.path.exists(described):
        state = json_object(described, "data.path", DataError)
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(f"data.path: {path} orders its rows by an index; allowed: a set saved after "
                            "flatten_indices()")
        names = [os.path.basename(str(entry.get("filename", ""))) for entry in state.get("_data_files", [])
                 if isinstance(entry, dict)]
        missing = next((name for name in names if not os.path.isfile(os.path.join(path, name))), None)
        if missing is not None or not names:
            raise DataError(f"data.path: {path}: state.json names {missing or 'no file'}; allowed: a whole folder of "
                            "save_to_disk")
        return [os.path.join(path, name) for name in names]
    files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names
                   if name.endswith(".parquet"))
    found = [file for file in files
             if not any(part.startswith(".") for part in os.path.relpath(file, path).split(os.sep))]
    if not found:
        raise DataError(f"data.path: {path} is no saved set; allowed: a folder of save_to_disk (state.json and .arrow "
                        "files), or one with .parquet files")
    return found


def scan(path: str, names: UniqueIds, progress: Callable[[int], None]) -> Iterator[Fragment]:
    first = 0
    try:
        with pa.memory_map(path) as source:
            schema = pa.ipc.read_schema(pa.ipc.read_message(source))
            encoded = next((field.name for field in schema if pa.types.is_dictionary(field.type)), None)
            if encoded is not None:
                raise DataError(f"data.path: {path}: column {encoded} is dictionary-encoded; allowed: plain columns")
            check_columns(schema, path)
            while source.tell() < source.size():
                start = source.tell()
                try:
                    message = pa.ipc.read_message(source)
                except EOFError:  # the end of the stream is a message too
                    return
                progress(start)
                stop, ids = source.tell(), _select(message, schema, ["id"])
                num_rows = max(1, min(ROWS_PER_FRAGMENT, MOST_BYTES * ids.num_rows // (stop - start)))
                for offset in range(0, ids.num_rows, num_rows):
                    part = ids.slice(offset, num_rows)
                    yield Fragment(path, "arrow", first, part.num_rows, (stop - start) * part.num_rows // ids.num_rows,
                                   0, offset, ((start, stop),), names.rename(given_ids(part), path, first))
                    first += part.num_rows
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DataError(f"data.path: {path} is not an Arrow stream: {first_line(error)}") from None


def read(fragment: Fragment, numbers: Sequence[int], max_bytes: int, media: bool) -> Iterator[Row]:
    start, stop = fragment.spans[0]
    source = pa.memory_map(fragment.path)
    schema = pa.ipc.read_schema(pa.ipc.read_message(source))
    source.seek(start)
    message = pa.ipc.read_message(source.read_buffer(stop - start))
    batch = _select(message, schema, ROW_COLUMNS if media else TEXT_COLUMNS).slice(fragment.offset, fragment.num_rows)
    check_unchanged(fragment, batch.num_rows)
    for number in numbers:
        yield read_row(batch, number, max_bytes)


def _select(message: pa.ipc.Message, schema: pa.Schema, names: Sequence[str]) -> pa.RecordBatch:
    """Those of the named columns that there are. Their offsets are checked, because those outside of the mapped file
    would be followed; strings are checked as bytes, because one that is not UTF-8 costs its row alone.
    """
    present = [name for name in names if name in schema.names]
    as_bytes = pa.schema([field.with_type(_as_bytes(field.type)) for field in schema])
    pa.ipc.read_record_batch(message, as_bytes).select(present).validate(full=True)
    return pa.ipc.read_record_batch(message, schema).select(present)


def _as_bytes(stored: pa.DataType) -> pa.DataType:
    """The type with binary in place of strings."""
    if pa.types.is_string(stored):
        return pa.binary()
    if pa.types.is_large_string(stored):
        return pa.large_binary()
    if pa.types.is_list(stored):
        return pa.list_(stored.value_field.with_type(_as_bytes(stored.value_type)))
    if pa.types.is_large_list(stored):
        return pa.large_list(stored.value_field.with_type(_as_bytes(stored.value_type)))
    if pa.types.is_struct(stored):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in stored])
    return stored
