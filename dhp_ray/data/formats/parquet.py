"""Parquet: a fragment is a row group, or a part of it.

Arrow unpacks a page at once, and a dictionary's values as often as rows repeat them. So few rows are read at a time,
and a row group whose columns would unpack to far more than is stored is not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dhp_ray.data.errors import DataError
from dhp_ray.data.formats.rows import (
    ROW_COLUMNS,
    TEXT_COLUMNS,
    Row,
    check_columns,
    check_unchanged,
    given_ids,
    read_row,
)
from dhp_ray.data.fragments import MOST_BYTES, Fragment, UniqueIds
from dhp_ray.errors import first_line

SUFFIXES = (".parquet",)
ROWS_OF_ROW_GROUP = 256
"""The most rows of a fragment: to read a few rows of a row group, the rows before them have to be read too."""

STREAM_BYTES = 2**20
"""Parquet is read in parts of this many bytes, not a whole column of a row group at once."""

READ_BYTES, READ_REPEATED_BYTES = 4 * 2**20, 128 * 2**20
"""Rows that are read at a time have about so many bytes, and at most so many if each has all that its columns with
dictionaries hold.
"""

MOST_COMPRESSED = 64
"""A column of a row group may be so many times as large as it is in the file, or have MOST_BYTES."""


def scan(path: str, names: UniqueIds, progress: Callable[[int], None]) -> Iterator[Fragment]:
    try:
        with _opened(path) as file:
            check_columns(file.schema_arrow, path)
            first = 0
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                ids = _ids(file, group)
                parts = max(1, -(-about.num_rows // ROWS_OF_ROW_GROUP))
                ends = [about.num_rows * (part + 1) // parts for part in range(parts)]  # of almost equal size
                for offset, end in zip([0, *ends], ends):
                    if end > offset:
                        renamed = names.rename(islice(ids, end - offset), path, first + offset)
                        num_bytes = about.total_byte_size * (end - offset) // about.num_rows
                        yield Fragment(path, "parquet", first + offset, end - offset, num_bytes, group, offset,
                                       names=renamed)
                first += about.num_rows
                progress(os.path.getsize(path) * (group + 1) // file.num_row_groups)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data.path: {path} is not parquet: {first_line(error)}") from None


def read(fragment: Fragment, numbers: Sequence[int], max_bytes: int, media: bool) -> Iterator[Row]:
    with _opened(fragment.path) as file:
        check_unchanged(fragment, file.metadata.row_group(fragment.row_group).num_rows - fragment.offset)
        columns = [name for name in (ROW_COLUMNS if media else TEXT_COLUMNS) if name in file.schema_arrow.names]
        wanted = [fragment.offset + number for number in numbers]
        if (error := _swollen(file, fragment.row_group, columns)):
            given = list(islice(_ids(file, fragment.row_group), fragment.offset + fragment.num_rows))
            yield from (Row(given[row], {}, error) for row in wanted)
            return
        first = done = 0
        # The rows before the fragment have to be decoded too; those after the last wanted one are not read.
        for batch in _batches(file, fragment.row_group, columns):
            while done < len(wanted) and wanted[done] < first + batch.num_rows:
                yield read_row(batch, wanted[done] - first, max_bytes)
                done += 1
            first += batch.num_rows
            if done == len(wanted):
                break


def _opened(path: str) -> pq.ParquetFile:
    return pq.ParquetFile(path, buffer_size=STREAM_BYTES, pre_buffer=False)  # else whole columns are read ahead


def _ids(file: pq.ParquetFile, group: int) -> Iterator[Any]:
    """The given ids of a row group's rows; None where there are none that can be read."""
    if "id" not in file.schema_arrow.names or _swollen(file, group, ["id"]):
        yield from [None] * file.metadata.row_group(group).num_rows
        return
    for batch in _batches(file, group, ["id"]):
        yield from given_ids(batch)


def _batches(file: pq.ParquetFile, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """These columns of a row group, few rows at a time."""
    about = file.metadata.row_group(group)
    chunks = _chunks(about, columns)
    mean = sum(chunk.total_uncompressed_size for chunk in chunks) // max(1, about.num_rows)
    repeated = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.has_dictionary_page)
    at_once = min(ROWS_OF_ROW_GROUP, READ_BYTES // max(1, mean), READ_REPEATED_BYTES // max(1, repeated))
    yield from file.iter_batches(max(1, at_once), row_groups=[group], columns=columns)


def _chunks(about: pq.RowGroupMetaData, columns: list[str]) -> list[pq.ColumnChunkMetaData]:
    """The stored columns of a row group that belong to these columns."""
    chunks = [about.column(number) for number in range(about.num_columns)]
    return [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]


def _swollen(file: pq.ParquetFile, group: int, columns: list[str]) -> str:
    """Why these columns of a row group cannot be read in bounded memory; empty if they can."""
    for chunk in _chunks(file.metadata.row_group(group), columns):
        if chunk.total_uncompressed_size > max(MOST_BYTES, MOST_COMPRESSED * chunk.total_compressed_size):
            stored, unpacked = chunk.total_compressed_size / 2**20, chunk.total_uncompressed_size / 2**20
            return (f"column {chunk.path_in_schema} of the row group has {unpacked:.0f} MB, stored as {stored:.1f}; "
                    f"allowed: at most {MOST_COMPRESSED} times as much as stored, or {MOST_BYTES / 2**20:g} MB")
    return ""
