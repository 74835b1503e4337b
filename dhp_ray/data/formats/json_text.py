"""JSON in the form of LLaVA: one array of objects, or one object per line."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dhp_ray.data.conversation import CONVERSATION_COLUMNS, json_of
from dhp_ray.data.errors import DataError, RowError
from dhp_ray.data.formats.rows import Row, cut_fragments, too_large
from dhp_ray.data.fragments import Fragment, UniqueIds

SUFFIXES = (".json", ".jsonl")
# Possessive (*+): otherwise the search remembers every escape of a string, at 60 times its size.
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


def scan(path: str, names: UniqueIds, progress: Callable[[int], None]) -> Iterator[Fragment]:
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

        yield from cut_fragments(path, "json", rows(), names)
    if num_rows and not has_conversations:
        raise DataError(f"data.path: {path}: no row has conversations; allowed: rows with id, image and conversations "
                        "(or messages)")


def read(fragment: Fragment, numbers: Sequence[int], max_bytes: int, media: bool) -> Iterator[Row]:
    """Images and videos are names or are inside a row's text, so a row is read whole, with or without `media`."""
    with open(fragment.path, "rb") as file:
        for start, stop in (fragment.spans[number] for number in numbers):
            if (error := too_large(stop - start, max_bytes)):
                yield Row("", {}, error)
                continue
            file.seek(start)
            text = file.read(stop - start)
            try:
                fields = json_of(text, "the row")
            except RowError as raised:
                yield Row("", {}, str(raised))
                continue
            if isinstance(fields, dict):
                yield Row(fields.get("id", ""), fields)
            else:
                yield Row("", {}, f"the row holds {type(fields).__name__}; allowed: an object")


def _parse(text: bytes, path: str, row: int) -> dict[str, Any]:
    """A row's fields; {} of a bad row, which is told when it is read. A bad first row means another kind of file."""
    try:
        fields = json_of(text, path)
    except RowError as error:
        if row == 0:
            raise DataError(f"data.path: {error} (in its first row; rows are the objects of one array, or one a line)"
                            ) from None
        return {}
    if row == 0 and not isinstance(fields, dict):
        raise DataError(f"data.path: {path} holds {type(fields).__name__} as its first row; allowed: objects")
    return fields if isinstance(fields, dict) else {}


def _row_spans(text: mmap.mmap, path: str) -> Iterator[tuple[int, int]]:
    """Byte ranges [start, stop) of the rows: elements of one JSON array, or lines."""
    if 0 in text[:4]:  # as in UTF-16 and UTF-32
        raise DataError(f"data.path: {path} is not JSON in UTF-8: it begins with {text[:4]!r}")
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
        raise DataError(f"data.path: {path} is not JSON: expected an object at byte {position}, found "
                        f"{gap.strip()[:40]!r}")
