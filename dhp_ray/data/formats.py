"""Rows as they are stored: JSON, parquet, Arrow streams, tar shards.

    id             name of the sample (optional; see data/index.py)
    conversations  LLaVA's turns (data/conversation.py); in parquet also as a JSON string
    messages       OpenAI's messages, likewise; used where there are no conversations
    tools          what the assistant may call (data/tools.py), a list or JSON text
    image, images  a file name below the image root, encoded bytes, {"bytes": ..., "path": ...}, or a list of these
    video, videos  likewise
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.parquet as pq

from dhp_ray.data.errors import RowError, first_line
from dhp_ray.data.fragments import Fragment
from dhp_ray.data.index import CONVERSATION_COLUMNS, ROW_COLUMNS, ROWS_OF_ROW_GROUP
from dhp_ray.data.saved_sets import read_batch
from dhp_ray.data.shards import MAX_SAMPLE_BYTES, first_key, read_sample

STREAM_BYTES = 2**20
"""Parquet is read in parts of so many bytes, not a whole column of a row group at once."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as stored; `error` says why `fields` cannot be used."""

    id: str
    fields: Mapping[str, Any]
    error: str = ""
    members: Mapping[str, bytes] | None = None
    """Images and videos by name, where they come with the row: then none is looked for among the files of the image root."""


def read_rows(fragment: Fragment) -> list[Row]:
    """The rows of a fragment, in the order of the file. Reads no byte of other rows.

    Raises:
        OSError, pyarrow.ArrowException: the file is gone or damaged.
    """
    names = dict(fragment.names)
    stored = {"json": _json_rows, "parquet": _parquet_rows, "tar": _tar_rows, "arrow": _arrow_rows}[fragment.kind](fragment)
    return [replace(row, id=names.get(offset) or str(row.id)) for offset, row in enumerate(stored)]


def conversation_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a row, as stored.

    Raises:
        RowError: there are none.
    """
    name = next((name for name in CONVERSATION_COLUMNS if fields.get(name) is not None), None)
    turns = fields.get(name) if name else None
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name} is not JSON: {first_line(error)}") from None
    if not isinstance(turns, list):
        raise RowError("no conversations; allowed: conversations, a list of turns with from and value, or messages, with role and content")
    return turns


def _json_rows(fragment: Fragment) -> Iterator[Row]:
    with open(fragment.path, "rb") as file:
        for start, stop in fragment.spans:
            file.seek(start)
            text = file.read(stop - start)
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError) as error:
                yield Row("", {}, f"the row is not JSON: {first_line(error)}")
                continue
            if isinstance(fields, dict):
                yield Row(fields.get("id", ""), fields)
            else:
                yield Row("", {}, f"the row holds {type(fields).__name__}; allowed: an object")


def _parquet_rows(fragment: Fragment) -> Iterator[Row]:
    with pq.ParquetFile(fragment.path, buffer_size=STREAM_BYTES) as file:
        columns = [name for name in ROW_COLUMNS if name in file.schema_arrow.names]
        stop = fragment.offset + fragment.num_rows
        first, tables = 0, []
        # The rows before have to be decoded too; those behind are not read.
        for batch in file.iter_batches(ROWS_OF_ROW_GROUP, row_groups=[fragment.row_group], columns=columns):
            if first + batch.num_rows > fragment.offset:
                begin = max(0, fragment.offset - first)
                tables.append(batch.slice(begin, stop - first - begin))
            first += batch.num_rows
            if first >= stop:
                break
    for fields in (fields for part in tables for fields in part.to_pylist()):
        yield Row(fields.get("id", ""), fields)


def _arrow_rows(fragment: Fragment) -> Iterator[Row]:
    batch = read_batch(fragment.path, *fragment.spans[0]).slice(fragment.offset, fragment.num_rows)
    batch = batch.select([name for name in ROW_COLUMNS if name in batch.schema.names])
    batch.validate(full=True)  # the file is mapped: offsets that lead out of it would be followed
    for fields in batch.to_pylist():
        yield Row(fields.get("id", ""), fields)


def _tar_rows(fragment: Fragment) -> Iterator[Row]:
    with open(fragment.path, "rb") as file:
        for start, stop in fragment.spans:
            key = ""
            try:
                if stop - start > MAX_SAMPLE_BYTES:
                    raise RowError(f"a sample of {(stop - start) / 2**30:.1f} GB; allowed: at most {MAX_SAMPLE_BYTES / 2**30:g}")
                file.seek(start)
                data = file.read(stop - start)
                key = first_key(data)
                fields, members = read_sample(data)
                yield Row(key, fields, members=members)
            except RowError as error:
                yield Row(key, {}, str(error), {})
            except (tarfile.TarError, EOFError, ValueError) as error:
                yield Row(key, {}, f"the sample's part of the tar file cannot be read: {first_line(error)}", {})
