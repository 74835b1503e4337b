"""The formats of data files, one module each with its SUFFIXES, `scan` (the fragments of a file) and `read` (the rows
of a fragment, with or without the bytes of their images and videos).

    data.format    llava       parquet, synthetic    webdataset    huggingface
    files          json_text   parquet               tar           arrow, parquet
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dhp_ray.data.errors import DataError, description
from dhp_ray.data.formats import arrow, json_text, parquet, tar
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.fragments import Fragment, UniqueIds, numbered
from dhp_ray.data.media import MediaLimits

FILE_FORMATS = {"json": json_text, "parquet": parquet, "tar": tar, "arrow": arrow}  # by the `kind` of a fragment
DATA_FORMATS = {"llava": ("json",), "parquet": ("parquet",), "synthetic": ("parquet",), "webdataset": ("tar",),
                "huggingface": ("arrow", "parquet")}
"""The kinds of files of each `data.format`."""


def format_suffixes(data_format: str) -> tuple[str, ...]:
    return tuple(suffix for kind in DATA_FORMATS[data_format] for suffix in FILE_FORMATS[kind].SUFFIXES)


def file_kind(path: str) -> str:
    suffix = os.path.splitext(path)[1]
    return next(kind for kind, file_format in FILE_FORMATS.items() if suffix in file_format.SUFFIXES)


def scan_file(path: str, kind: str, names: UniqueIds, progress: Callable[[int], None]) -> Iterator[Fragment]:
    """The fragments of one file. DataError: it is damaged, has another form, or lacks columns."""
    try:
        yield from FILE_FORMATS[kind].scan(path, names, progress)
    except DataError:
        raise
    except Exception as error:  # foreign bytes make readers raise errors of many kinds
        raise DataError(f"data.path: {path} cannot be read: {description(error)}") from None


def read_rows(
    fragment: Fragment, wanted: Sequence[int] | None = None, max_bytes: int = MediaLimits().max_file_bytes,
    media: bool = True
) -> Iterator[Row]:
    """The wanted rows of a fragment (ascending numbers; None: all), one after the other, reading few others. A row of
    more than `max_bytes` is a bad row, not read. OSError, pyarrow.ArrowException: the file is gone, damaged or changed.
    """
    numbers, names = range(fragment.num_rows) if wanted is None else wanted, dict(fragment.names)
    stored = FILE_FORMATS[fragment.kind].read(fragment, numbers, max_bytes, media)
    for number, row in zip(numbers, stored, strict=True):
        own = names.get(number) or str(row.id) or numbered(Path(fragment.path).stem, fragment.first_row + number)
        yield replace(row, id=own)


def read_texts(fragment: Fragment, max_bytes: int) -> list[Row]:
    """Like `read_rows`, without images and videos, for a whole set. DataError: the file is gone or damaged."""
    try:
        return list(read_rows(fragment, None, max_bytes, media=False))
    except Exception as error:  # readers raise errors of many kinds on foreign bytes
        raise DataError(f"data.path: {fragment.path} cannot be read: {description(error)}") from None
