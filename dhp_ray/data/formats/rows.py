"""The content of a row in every format, and the fragments in which rows are read.

    id             name of the sample (optional; see UniqueIds)
    conversations  LLaVA's turns (data/conversation.py); in parquet also as a JSON string
    messages       OpenAI's messages, likewise; used if there are no conversations
    system         the text of a system turn before them, unless they begin with one (LLaMA-Factory)
    answers        right answers in addition to the last turn of the assistant (jobs/evaluate.py), a list or one
    tools          what the assistant may call (see data/conversation.py), a list or JSON text; or functions
    objects        ms-swift's names and places for marks in texts, refused with these marks; audio, audios, refused
    image, images  a file name below the image root, a data: URI, encoded bytes, {"bytes": ..., "path": ...},
                   {"image": ...}, or a list of these; null and empty texts are no image
    video, videos  likewise; a video may be a list of its frames, or {"video": [...], "fps": 2}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dhp_ray.data.conversation import AUDIO_COLUMNS, CONVERSATION_COLUMNS, media_keys
from dhp_ray.data.errors import DataError
from dhp_ray.data.fragments import MOST_BYTES, Fragment, UniqueIds
from dhp_ray.errors import first_line

ROWS_PER_FRAGMENT = 32
MEDIA_COLUMNS = ("image", "images", "video", "videos")
TEXT_COLUMNS = ("id", *CONVERSATION_COLUMNS, "system", "tools", "functions", "objects", *AUDIO_COLUMNS, "answers")
ROW_COLUMNS = (*TEXT_COLUMNS, *MEDIA_COLUMNS)


@dataclass(frozen=True, slots=True)
class Row:
    """One row as stored; `error` says why `fields` cannot be used."""

    id: str
    fields: Mapping[str, Any]
    error: str = ""
    members: Mapping[str, bytes] | None = None
    """Images and videos by name, if they come with the row; then no file of the image root is used."""


def cut_fragments(
    path: str, kind: str, rows: Iterator[tuple[Any, tuple[int, int]]], names: UniqueIds
) -> Iterator[Fragment]:
    """Fragments of rows that are given as (id, byte range)."""
    first = 0
    for part in _parts(rows):
        renamed = names.rename((given for given, _ in part), path, first)
        spans = tuple(span for _, span in part)
        yield Fragment(path, kind, first, len(part), sum(stop - start for start, stop in spans), spans=spans,
                       names=renamed)
        first += len(part)


def _parts(rows: Iterator[tuple[Any, tuple[int, int]]]) -> Iterator[list[tuple[Any, tuple[int, int]]]]:
    """The rows in parts of at most ROWS_PER_FRAGMENT, and of at most MOST_BYTES unless of a single row."""
    part: list[tuple[Any, tuple[int, int]]] = []
    num_bytes = 0
    for given, (start, stop) in rows:
        num_bytes += stop - start
        if part and (len(part) == ROWS_PER_FRAGMENT or num_bytes > MOST_BYTES):
            yield part
            part, num_bytes = [], stop - start
        part.append((given, (start, stop)))
    if part:
        yield part


def check_unchanged(fragment: Fragment, num_rows: int) -> None:
    """Refuse a file that has only so many rows where those of the fragment were."""
    if num_rows < fragment.num_rows:
        raise OSError(f"it has changed since it was indexed: {num_rows} rows are where there were {fragment.num_rows}")


def read_row(batch: pa.RecordBatch, number: int, max_bytes: int) -> Row:
    """A row of columns; a bad row if it has more than `max_bytes`."""
    row = batch.slice(number, 1)
    if (error := too_large(row.nbytes, max_bytes)):
        return Row(given_ids(row)[0], {}, error)
    try:
        [fields] = row.to_pylist()
    except UnicodeDecodeError as raised:  # Arrow takes the bytes of strings as they are
        return Row(given_ids(row)[0], {}, f"a string of the row is not UTF-8: {first_line(raised)}")
    return Row(fields.get("id", ""), {name: _without_nulls(value) for name, value in fields.items()})


def _without_nulls(value: Any) -> Any:
    """The value without keys of structs that are null: a column gives every call of a tool the arguments of all. NaN is
    null too, as which pandas has it in a column.
    """
    if isinstance(value, dict):
        kept = {name: _without_nulls(inner) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value if value == value else None


def given_ids(batch: pa.RecordBatch) -> list[Any]:
    """The given ids of rows; None where there is none, or one that is not UTF-8."""
    if "id" not in batch.schema.names:
        return [None] * batch.num_rows
    try:
        return batch["id"].to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [given_ids(batch.slice(number, 1))[0] for number in range(batch.num_rows)]


def too_large(num_bytes: int, max_bytes: int) -> str:
    """Why a row of so many bytes cannot be used; empty if it can."""
    if num_bytes <= max_bytes:
        return ""
    return f"the row has {num_bytes / 2**20:.1f} MB; allowed: at most {max_bytes / 2**20:g} (data.max_file_mb)"


def check_columns(schema: pa.Schema, path: str) -> None:
    """Refuse a file whose columns hold no conversations, or media of a wrong type."""
    present = [name for name in CONVERSATION_COLUMNS if name in schema.names]
    if not present:
        raise DataError(f"data.path: {path} has no column conversations or messages (it has "
                        f"{', '.join(schema.names)}); allowed: id, image or images, video or videos, conversations or "
                        "messages")
    for name in present:
        kind = schema.field(name).type
        turns = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if (
            not (turns and pa.types.is_struct(kind.value_type))
            and not pa.types.is_string(kind)
            and not pa.types.is_large_string(kind)
        ):
            raise DataError(f"data.path: {path}: column {name} holds {kind}; allowed: a list of structs (from and "
                            "value, or role and content), or JSON text")
    for name in MEDIA_COLUMNS:
        if name in schema.names and not _holds_media(schema.field(name).type, name.removesuffix("s")):
            raise DataError(f"data.path: {path}: column {name} holds {schema.field(name).type}; allowed: bytes, "
                            "string, struct with bytes or path, or a list of these")


def _holds_media(stored: pa.DataType, kind: str) -> bool:
    if pa.types.is_list(stored) or pa.types.is_large_list(stored):
        stored = stored.value_type
    if kind == "video" and (pa.types.is_list(stored) or pa.types.is_large_list(stored)):  # of frames
        stored, kind = stored.value_type, "image"
    if pa.types.is_struct(stored):
        return any(stored.get_field_index(name) >= 0 for name in media_keys(kind))
    return any(test(stored) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string,
                                         pa.types.is_large_string, pa.types.is_null))
