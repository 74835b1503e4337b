"""Parquet: a fragment is a row group, or a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from dhp_ray.data.errors import DataError
from dhp_ray.data.formats.stored_rows import ROW_COLUMNS, TEXT_COLUMNS, Row, check_columns, new_names
from dhp_ray.data.fragments import Fragment
from dhp_ray.data.names import Names
from dhp_ray.errors import first_line

SUFFIXES = (".parquet",)
ROWS_OF_ROW_GROUP = 256
"""The most rows of a fragment: to read a few rows of a row group, the rows before them have to be read too."""

STREAM_BYTES = 2**20
"""Parquet is read in parts of this many bytes, not a whole column of a row group at once."""


def scan(path: str, names: Names, progress: Callable[[int], None]) -> Iterator[Fragment]:
    try:
        with pq.ParquetFile(path) as file:
            check_columns(file.schema_arrow, path)
            first = 0
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                ids = (
                    file.read_row_group(group, columns=["id"])["id"]
                    if "id" in file.schema_arrow.names
                    else pa.nulls(about.num_rows)
                )
                parts = max(1, -(-about.num_rows // ROWS_OF_ROW_GROUP))
                ends = [about.num_rows * (part + 1) // parts for part in range(parts)]  # of almost equal size
                for offset, end in zip([0, *ends], ends):
                    if end > offset:
                        renamed = new_names(ids[offset:end].to_pylist(), names, path, first + offset)
                        num_bytes = about.total_byte_size * (end - offset) // about.num_rows
                        yield Fragment(path, "parquet", first + offset, end - offset, num_bytes, group, offset,
                                       names=renamed)
                first += about.num_rows
                progress(os.path.getsize(path) * (group + 1) // file.num_row_groups)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data.path: {path} is not parquet: {first_line(error)}") from None


def read(fragment: Fragment, media: bool = True) -> Iterator[Row]:
    with pq.ParquetFile(fragment.path, buffer_size=STREAM_BYTES) as file:
        columns = [name for name in (ROW_COLUMNS if media else TEXT_COLUMNS) if name in file.schema_arrow.names]
        stop = fragment.offset + fragment.num_rows
        first, tables = 0, []
        # The rows before the fragment have to be decoded too; those after it are not read.
        for batch in file.iter_batches(ROWS_OF_ROW_GROUP, row_groups=[fragment.row_group], columns=columns):
            if first + batch.num_rows > fragment.offset:
                begin = max(0, fragment.offset - first)
                tables.append(batch.slice(begin, stop - first - begin))
            first += batch.num_rows
            if first >= stop:
                break
    for fields in (fields for part in tables for fields in part.to_pylist()):
        yield Row(fields.get("id", ""), fields)
