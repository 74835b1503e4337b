"""Rows as they are stored, LLaVA JSON or parquet, to conversations and encoded images.

    id             name of the sample (optional; see data/index.py)
    conversations  [{"from": "human" | "gpt" | "system", "value": "<image>\\nWhat is this?"}, ...]; in parquet also as a JSON string
    image, images  a file name below the image root, encoded bytes, {"bytes": ..., "path": ...}, or a list of these
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dhp_ray.data.errors import RowError, first_line
from dhp_ray.data.index import PARQUET_COLUMNS, Fragment


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
    turns = fields.get("conversations")
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except ValueError as error:
            raise RowError(f"conversations is not JSON: {first_line(error)}") from None
    if not isinstance(turns, list):
        raise RowError("no conversations; allowed: a list of turns with from and value")
    return turns


def images_of(fields: Mapping[str, Any], image_root: str) -> list[bytes]:
    """The encoded images of a row, in order. Reads files below `image_root`.

    Raises:
        RowError: an image that is missing, or lies outside of the root.
    """
    if fields.get("video") or fields.get("videos"):
        raise RowError("the row has a video; allowed: its frames as images")
    values = fields.get("images")
    if values is None:
        values = fields.get("image")
    if values is None:
        return []
    values = values if isinstance(values, list) else [values]
    images = []
    for number, value in enumerate(values, 1):
        try:
            images.append(_image(value, image_root))
        except RowError as error:
            raise RowError(f"image {number}: {error}") from None
    return images


def resolve(image_root: str, name: str) -> Path:
    """The file that `name` means below the root, links followed.

    Raises:
        RowError: a URL, an absolute name, or one that leads out of the root.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|data:", name):
        raise RowError(f"{name[:80]} is a URL; allowed: a file name below data.image_root")
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise RowError(f"{name[:200]!r} is not a relative file name; allowed: one below data.image_root, without '..'")
    root = Path(os.path.realpath(image_root))
    path = Path(os.path.realpath(root / name))
    if not path.is_relative_to(root):
        raise RowError(f"{name} leads out of data.image_root ({image_root}); allowed: files below it")
    return path


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
        columns = [name for name in PARQUET_COLUMNS if name in file.schema_arrow.names]
        table = file.read_row_group(fragment.row_group, columns=columns)
    for fields in table.to_pylist():
        yield fields, ""


def _image(value: Any, image_root: str) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise RowError(f"got {type(value).__name__}; allowed: a file name or encoded bytes")
    path = resolve(image_root, value)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
            raise RowError(f"{value} is not a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise RowError(f"{value}: no such file below data.image_root ({image_root})") from None
    except OSError as error:
        raise RowError(f"{value}: {error.strerror}") from None
