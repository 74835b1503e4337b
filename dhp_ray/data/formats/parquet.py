"""Parquet: a fragment is a row group, or a part of it. Arrow unpacks a page at once, and a dictionary's values as often
as rows repeat them. So few rows are read at a time, and no row group that would unpack to far more than is stored.
"""

from __future__ import annotations

import os
import re
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
from dhp_ray.data.fragments import MOST_BYTES, Fragment, Fragments, UniqueIds
from dhp_ray.errors import first_line

SUFFIXES = (".parquet",)
ROWS_OF_ROW_GROUP = 256  # the most rows of a fragment: to read a few, those before them have to be read too
STREAM_BYTES = 2**20  # parquet is read in parts of this many bytes, not a whole column of a row group at once

READ_BYTES, READ_REPEATED_BYTES = 4 * 2**20, 128 * 2**20
"""About so many bytes are read at a time; at most so many if each row has all values of its columns' dictionaries."""

_DICTIONARY_PAGE = re.compile(rb"\x15\x04\x15([\x80-\xff]*[\x00-\x7f])")
"""A page's header (parquet.thrift, compact protocol): a dictionary (2), and its unpacked bytes, as zigzag varints."""

MANY_PARTS = 16  # a row group of more fragments takes so long to read that the run says so
MOST_COMPRESSED = 64  # a column of a row group may be so many times as large as it is in the file, or have MOST_BYTES


def scan(path: str, names: UniqueIds, progress: Callable[[int], None]) -> Iterator[Fragment]:
    try:
        with _opened(path) as file:
            check_columns(file.schema_arrow, path)
            first = 0
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                ids = _ids(file, path, group)
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
            given = list(islice(_ids(file, fragment.path, fragment.row_group), fragment.offset + fragment.num_rows))
            yield from (Row(given[row], {}, error) for row in wanted)
            return
        first = done = 0
        # The rows before the fragment have to be decoded too; those after the last wanted one are not read.
        for batch in _batches(file, fragment.path, fragment.row_group, columns):
            while done < len(wanted) and wanted[done] < first + batch.num_rows:
                yield read_row(batch, wanted[done] - first, max_bytes)
                done += 1
            first += batch.num_rows
            if done == len(wanted):
                break


def row_group_warning(fragments: Fragments) -> str:
    """A line if row groups have so many rows that reading them in fragments takes many times as long; else empty."""
    path, num_rows = fragments.largest_row_group()
    parts = -(-num_rows // ROWS_OF_ROW_GROUP)
    if parts <= MANY_PARTS:
        return ""
    return (f"data.path: {path} has a row group of {num_rows} rows, and to read some of them, those before them are "
            f"decoded too: reading takes about {parts // 2} times as long as with row_group_size={ROWS_OF_ROW_GROUP}")


def _opened(path: str) -> pq.ParquetFile:
    return pq.ParquetFile(path, buffer_size=STREAM_BYTES, pre_buffer=False)  # else whole columns are read ahead


def _ids(file: pq.ParquetFile, path: str, group: int) -> Iterator[Any]:
    """The given ids of a row group's rows; None where there are none that can be read."""
    if "id" not in file.schema_arrow.names or _swollen(file, group, ["id"]):
        yield from [None] * file.metadata.row_group(group).num_rows
        return
    for batch in _batches(file, path, group, ["id"]):
        yield from given_ids(batch)


def _batches(file: pq.ParquetFile, path: str, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """These columns of a row group, few rows at a time."""
    about = file.metadata.row_group(group)
    chunks = _chunks(about, columns)
    mean = sum(chunk.total_uncompressed_size for chunk in chunks) // max(1, about.num_rows)
    repeated = sum(_repeated_bytes(path, chunk) for chunk in chunks)
    at_once = min(ROWS_OF_ROW_GROUP, READ_BYTES // max(1, mean), READ_REPEATED_BYTES // max(1, repeated))
    yield from file.iter_batches(max(1, at_once), row_groups=[group], columns=columns)


def _repeated_bytes(path: str, chunk: pq.ColumnChunkMetaData) -> int:
    """The unpacked bytes of a column's dictionary, which writers end after 1,024 values of 1 MB together."""
    if not chunk.has_dictionary_page:
        return 0
    with open(path, "rb") as file:
        file.seek(chunk.dictionary_page_offset)
        header = _DICTIONARY_PAGE.match(file.read(8))
    if header is None or chunk.dictionary_page_offset >= chunk.data_page_offset:
        return chunk.total_uncompressed_size
    return sum((byte & 127) << 7 * place for place, byte in enumerate(header[1])) >> 1


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
