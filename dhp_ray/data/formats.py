"""Rows as they are stored, JSON or parquet.

    id             name of the sample (optional; see data/index.py)
    conversations  LLaVA's turns (data/conversation.py); in parquet also as a JSON string
    messages       OpenAI's messages, likewise; used where there are no conversations
    image, images  a file name below the image root, encoded bytes, {"bytes": ..., "path": ...}, or a list of these
    video, videos  likewise
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from dhp_ray.data.errors import RowError, first_line
from dhp_ray.data.index import CONVERSATION_COLUMNS, ROW_COLUMNS, Fragment


@dataclass(frozen=True, slots=True)
class Row:
    """One row as stored; `error` says why `fields` is empty."""

    id: str
    fields: Mapping[str, Any]
    error: str = ""


def read_rows(fragment: Fragment) -> list[Row]:
    """The rows of a fragment, in the order of the file. Reads no byte of other rows.

    Raises:
        OSError, pyarrow.ArrowException: the file is gone or damaged.
    """
    names = dict(fragment.names)
    stored = _parquet_rows(fragment) if fragment.kind == "parquet" else _json_rows(fragment)
    rows = []
    for offset, (fields, error) in enumerate(stored):
        name = names.get(offset) or str(fields.get("id"))
        rows.append(Row(name, fields, error))
    return rows


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


def _json_rows(fragment: Fragment) -> Iterator[tuple[Mapping[str, Any], str]]:
    with open(fragment.path, "rb") as file:
        for start, stop in fragment.spans:
            file.seek(start)
            text = file.read(stop - start)
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError) as error:
                yield {}, f"the row is not JSON: {first_line(error)}"
                continue
            yield (fields, "") if isinstance(fields, dict) else ({}, f"the row holds {type(fields).__name__}; allowed: an object")


def _parquet_rows(fragment: Fragment) -> Iterator[tuple[Mapping[str, Any], str]]:
    with pq.ParquetFile(fragment.path) as file:
        columns = [name for name in ROW_COLUMNS if name in file.schema_arrow.names]
        table = file.read_row_group(fragment.row_group, columns=columns)
    for fields in table.to_pylist():
        yield fields, ""
