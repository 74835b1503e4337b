"""The index of a data set, kept for later starts: one pass over its files finds the fragments, and gives rows ids.

A fragment is, of parquet, a row group or up to 256 rows of it; else up to 32 rows of at most about 256 MB: of JSON and
tar shards with their byte ranges, of an Arrow stream of one record batch.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import numpy as np

from dhp_ray.data import fragments as kept
from dhp_ray.data.conversation import stored_role, stored_turns
from dhp_ray.data.errors import DataError, RowError, description
from dhp_ray.data.formats import DATA_FORMATS, file_kind, format_suffixes, read_rows, read_texts, scan_file
from dhp_ray.data.formats.arrow import saved_files
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.fragments import Fragment, Fragments, UniqueIds
from dhp_ray.data.media import file_bytes
from dhp_ray.errors import printable
from dhp_ray.schema import Data

KEPT_FROM_BYTES = 8 * 2**20  # the index of less data is made at every start, as fast as finding a stored one
NUM_FRAGMENTS, ROWS_OF_EACH = 16, 4
MEDIA_WITHIN_BYTES = 16 * 2**10
"""Rows of at least so many bytes on average hold their images and videos; of smaller ones a few are read."""

TRAINING = {"train", "training"}
HELD_OUT = {"valid", "validation", "val", "dev", "test", "testing", "eval", "evaluation"}
"""Words in the names of files, by which the library `datasets` finds splits."""
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_FOLDERS, _OF_EACH = 100, 1000
"""The sub-folders of a folder, and the entries of each, that are looked at for data that is left out."""

Progress = Callable[[int, int], None]  # called with the bytes done and the total bytes


def index_fragments(data: Data, progress: Progress = lambda done, total: None) -> Fragments:
    """The fragments of `data.path`, files by name and rows in order. DataError: a file is missing or another form's."""
    files = _files(data)
    try:
        sizes = [os.path.getsize(path) for path, _ in files]
        key = kept.cache_key(files) if sum(sizes) >= KEPT_FROM_BYTES else ""
    except OSError as error:  # a link to nothing, say
        raise DataError(f"data.path: {error.filename} cannot be read: {description(error)}") from None
    table = kept.load(key) if key else None
    if table is None:
        table = kept.packed(_scanned(files, sizes, progress))
        table = kept.store(key, table) if key else table
    found = Fragments(table)
    if not len(found):
        raise _no_rows(data)
    return found


def _scanned(files: list[tuple[str, str]], sizes: list[int], progress: Progress) -> Iterator[Fragment]:
    names, done = UniqueIds(), 0
    for (path, kind), size in zip(files, sizes):
        yield from scan_file(path, kind, names, lambda place: progress(done + place, sum(sizes)))  # noqa: B023
        done += size


def check_form(data: Data) -> None:
    """Refuse data whose first rows show that there are none, or another form. Takes milliseconds."""
    image_root(data)
    files = _files(data)
    if others := _left_out(data):
        logging.getLogger(__name__).warning(
            "%s", printable(f"{data.path}: files read: {len(files)}; {others}"))
    for path, kind in files:
        if list(islice(scan_file(path, kind, UniqueIds(), lambda position: None), 2)):
            return
    raise _no_rows(data)


def check_answers(fragments: Fragments, max_bytes: int) -> None:
    """Refuse held-out samples if none of them has an answer. Reads rows up to the first one that has an answer."""
    for fragment in fragments:
        if any(map(_is_answered, read_texts(fragment, max_bytes))):
            return
    raise DataError(f"data.path: none of the {fragments.num_rows} samples has an answer; allowed: at least one "
                    "conversation in which the assistant speaks")


def _is_answered(row: Row) -> bool:
    try:
        turns = stored_turns(row.fields)
    except RowError:
        return False
    return "assistant" in map(stored_role, turns)


def _files(data: Data) -> list[tuple[str, str]]:
    return [(path, file_kind(path)) for path in data_files(data)]


def _no_rows(data: Data) -> DataError:
    return DataError(f"data.path: {data.path} holds no rows; allowed: at least one")


def data_sources(data: Data) -> list[Data]:
    """The data itself, or each of `data.sources` as data of its own."""
    return [replace(data, path=source.path, format=source.format or data.format, sources=[])
            for source in data.sources] or [data]


def held_out(data: Data, path: str) -> Data:
    """The data of `eval.path`: in the form of the training data, from a single path."""
    return replace(data, path=path, sources=[])


def data_files(data: Data) -> list[str]:
    """The file `data.path`, or the format's files in that folder, by name. DataError: none, or of several splits."""
    if not data.path:
        raise DataError("data.path: empty; allowed: a file or a folder of files")
    path = os.path.abspath(data.path)
    if os.path.isfile(path):
        if os.path.splitext(path)[1] not in format_suffixes(data.format):
            raise DataError(f"data.path: {data.path} is no file of the format {data.format}; allowed: a name ending in "
                            f"{' or '.join(format_suffixes(data.format))}{_format_of([path])}")
        return [path]
    if not os.path.isdir(path):
        written = data.format == "synthetic" and path.endswith(format_suffixes(data.format))
        hint = "; jobs/prepare_data.py writes it" if written else ""
        raise DataError(f"data.path: no file or folder {data.path}{hint}")
    if data.format == "huggingface":
        return _without_held_out(path, saved_files(path))
    suffixes = format_suffixes(data.format)
    found = sorted(name for name in os.listdir(path) if name.endswith(suffixes) and not name.startswith((".", "_")))
    if not found:
        raise DataError(f"data.path: {data.path} holds no file of the format {data.format}; allowed: names ending in "
                        f"{' or '.join(suffixes)}{_format_of(sorted(os.listdir(path)))}")
    return _without_held_out(path, [os.path.join(path, name) for name in found])


def _without_held_out(path: str, files: list[str]) -> list[str]:
    """The files. DataError: their names below the folder have words of a split for training, and of one held out."""
    found: dict[bool, str] = {}
    for file in files:
        words = {*re.split("[^a-z]+", os.path.relpath(file, path).lower())}
        if words & TRAINING or words & HELD_OUT:
            found.setdefault(bool(words & HELD_OUT), os.path.relpath(file, path))
    if len(found) == 2:
        raise DataError(f"data.path: {path} holds the splits of {found[False]}, for training, and of {found[True]}, "
                        "held out; allowed: one of them, in a folder of its own or as a file")
    return files


def _left_out(data: Data) -> str:
    """What a folder holds that is like its data but not read: compressed files, and files in sub-folders."""
    if data.format == "huggingface" or not os.path.isdir(data.path):
        return ""
    suffixes = format_suffixes(data.format)
    packed = tuple(suffix + end for suffix in suffixes for end in _COMPRESSED)
    with os.scandir(data.path) as entries:
        there = {entry.name: entry.is_dir() for entry in entries if not entry.name.startswith((".", "_"))}
    compressed = sorted(name for name in there if name.endswith(packed) and os.path.splitext(name)[0] not in there)
    folders = []
    for name in sorted(name for name, is_folder in there.items() if is_folder)[:_FOLDERS]:
        with suppress(OSError), os.scandir(os.path.join(data.path, name)) as entries:
            if any(entry.name.endswith(suffixes + packed) for entry in islice(entries, _OF_EACH)):
                folders.append(name)
    return "; ".join(f"{what}, left out: {len(names)} ({names[0]}{', ...' * (len(names) > 1)})" for names, what in (
        (compressed, "compressed"), (folders, "sub-folders with such files")) if names)


def _format_of(names: list[str]) -> str:
    """The format that reads some of these files, for the end of an error; empty if none does."""
    found = (name for name in DATA_FORMATS for file in names if file.endswith(format_suffixes(name)))
    return f", or data={name}" if (name := next(found, "")) else ""


def image_root(data: Data) -> str:
    """The folder to which image names are relative."""
    if data.image_root:
        if not os.path.isdir(data.image_root):
            raise DataError(f"data.image_root: no folder {data.image_root}")
        return os.path.realpath(data.image_root)
    path = os.path.realpath(data.path)
    return path if os.path.isdir(path) else os.path.dirname(path)


def mean_file_bytes(fragments: Fragments, image_root: str) -> int:
    """Mean bytes of the files that a row names, over a few rows from everywhere; 0 for what cannot be read."""
    if fragments.num_bytes.sum() >= MEDIA_WITHIN_BYTES * fragments.num_rows:
        return 0
    found = []
    for number in sorted({int(place) for place in np.linspace(0, len(fragments) - 1, NUM_FRAGMENTS)}):
        fragment = fragments[number]
        if fragment.kind == "tar":
            return 0
        try:
            rows = read_rows(fragment, range(min(ROWS_OF_EACH, fragment.num_rows)))
            found += [file_bytes(row.fields, image_root) for row in rows]
        except Exception:  # the file is gone or damaged, of which reading its rows will say more
            continue
    return int(np.mean(found)) if found else 0
