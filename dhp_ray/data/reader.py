"""The reading stage, in Ray Data's tasks: turns rows of fragments into blocks of payload of about MOST_BYTES, one at a
time. A row that cannot be used keeps its place in the block, with the reason in `error`, and never breaks it.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from dhp_ray.credentials import shown
from dhp_ray.data.conversation import Turn, last_answer, read_turns, stored_tools, stored_turns
from dhp_ray.data.errors import RowError, description
from dhp_ray.data.families.base import SLICE_TOKENS, Size
from dhp_ray.data.formats import read_rows
from dhp_ray.data.formats.rows import Row
from dhp_ray.data.fragments import MOST_BYTES, Fragment
from dhp_ray.data.images import image_size
from dhp_ray.data.media import read_media, with_videos
from dhp_ray.data.order import RowRange, row_order
from dhp_ray.data.processor import IGNORE, Processor, ProcessorSpec
from dhp_ray.data.video import read_clip
from dhp_ray.errors import about, first_line

PAYLOAD = pa.schema([
    ("position", pa.int64()),  # place of the fragment in the epoch's order
    ("row", pa.int64()),  # place of the row in the fragment's order
    ("id", pa.string()),
    ("text_tokens", pa.int64()),
    ("vision_tokens", pa.int64()),
    # (time, height, width) in patches of every image, and of every piece of a video
    ("grids", pa.list_(pa.list_(pa.int32()))),
    ("error", pa.string()),  # why the row cannot be used; empty if it can
    ("input_ids", pa.list_(pa.int32())),
    ("labels", pa.list_(pa.int32())),
    ("images", pa.list_(pa.large_binary())),  # images and videos in the order of the text, encoded as stored
    ("media", pa.list_(pa.int32())),  # for every grid, the place in `images` of its image or video
    ("seconds", pa.list_(pa.float64())),  # for every grid, the seconds of one step in time of a video; 0: an image
])
LENGTH_COLUMNS = ["position", "row", "id", "text_tokens", "vision_tokens", "grids", "error"]
UNREADABLE = -1  # value of `row` if the fragment's file is gone, damaged or changed; `id` is then the file


def make_item(epoch: int, parts: Sequence[tuple[RowRange, int, Fragment]]) -> dict[str, Any]:
    """What ReadFragments reads at once: parts of fragments, each with the number by which the fragment is shuffled."""
    return {"epoch": epoch, "parts": pickle.dumps(parts)}


@dataclass(frozen=True)
class ReadFragments:
    """Maps items to blocks of `PAYLOAD`: for each part of an item its rows, as they follow in the file."""

    processor: ProcessorSpec
    image_root: str
    seed: int
    max_tokens: int = 0
    max_image_tokens: int = 0
    prefix: str = ""
    answer_tokens: int = 0
    """If above 0, rows are prompts for the last answer, with room for so many tokens, which alone has labels."""
    most_bytes: int = MOST_BYTES
    """A block is complete when its images and videos have so many bytes."""

    def __call__(self, items: pa.Table) -> Iterator[pa.Table]:
        for item in items.to_pylist():
            records: list[dict[str, Any]] = []
            num_bytes = 0
            for record in self._records(item):
                records.append(record)
                num_bytes += sum(map(len, record["images"]))
                if num_bytes >= self.most_bytes:
                    block, num_bytes = _block(records), 0
                    records.clear()
                    del record  # the block has a copy of it
                    yield block
                    del block
            if records:
                yield _block(records)

    def block(self, item: Mapping[str, Any], rows: Sequence[int]) -> pa.Table:
        """These of the rows that an item's blocks have together."""
        records = list(self._records(item, rows))
        if records[-1]["row"] == UNREADABLE:
            return _block(records[-1:])
        return _block(records).take([sorted(rows).index(row) for row in rows])

    def _records(self, item: Mapping[str, Any], rows: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
        """The rows of an item, or these of them; UNREADABLE is the last, from a file that is gone or damaged."""
        processor, begin = _loaded(self.processor), 0
        parts: list[tuple[RowRange, int, Fragment]] = pickle.loads(item["parts"])
        for part, number, fragment in parts:
            order = row_order(self.seed, item["epoch"], number, fragment.num_rows)
            place_of = {order[place]: place for place in range(part.first, part.stop)}
            wanted = sorted(place_of)
            if rows is not None:
                wanted = [wanted[row - begin] for row in sorted(rows) if 0 <= row - begin < len(place_of)]
            begin += len(place_of)
            try:
                for offset, row in zip(wanted, read_rows(fragment, wanted, processor.family.limits.max_file_bytes)):
                    yield {"position": part.position,
                           "row": place_of[offset]} | self._record(self._named(row, item["epoch"]), processor)
            # the file is gone or damaged, and readers raise errors of many kinds on foreign bytes
            except Exception as error:
                # Reported as data: an error raised here would reach the driver as text, wrapped several times.
                yield _unusable(fragment.path,
                                description(error)) | {"position": part.position, "row": UNREADABLE}
                return

    def _named(self, row: Row, epoch: int) -> Row:
        """For a mixture, the row with an id of its own: source in front, behind it the number of a later pass."""
        if not self.prefix:
            return row
        numbered = epoch or re.search(r"~[0-9]+\Z", row.id)
        return replace(row, id=f"{self.prefix}{row.id}{f'~{epoch + 1}' if numbered else ''}")

    def _record(self, row: Row, processor: Processor) -> dict[str, Any]:
        try:
            return {"id": row.id, "error": ""} | self._payload(row, processor)
        except MemoryError:  # of the machine, not of the row
            raise
        # foreign rows raise errors of many kinds; a bad row must not break its block
        except Exception as error:
            return _unusable(row.id, bad_row_reason(error))

    def _payload(self, row: Row, processor: Processor) -> dict[str, Any]:
        turns, images, sizes = read_contents(row, processor, self.image_root)
        slice_tokens = min(SLICE_TOKENS, self.max_image_tokens or SLICE_TOKENS)
        if self.answer_tokens:
            asked = turns[:last_answer(turns)]
            processor.references(row.fields, turns)  # refuses a row whose `answers` are not texts
            images = images[:sum(len(turn.media) for turn in asked)]
            _, prompt = processor.encode_prompt(asked, sizes[:len(images)], slice_tokens)
            room = np.full(self.answer_tokens, processor.token_ids["pad"], np.int32)
            encoded = prompt._replace(input_ids=np.concatenate([prompt.input_ids, room]),
                                      labels=np.concatenate([np.full_like(prompt.labels, IGNORE), room]))
        else:
            encoded = processor.encode_turns(turns, sizes, slice_tokens)
        num_tokens = len(encoded.input_ids)
        if self.max_tokens and num_tokens > self.max_tokens:
            raise RowError(f"{num_tokens} tokens in one sequence; allowed: at most {self.max_tokens} "
                           "(planner.max_sequence_tokens)")
        for number, grid in zip(encoded.media, encoded.grids):
            image_tokens = math.prod(grid) // processor.family.merge_size**2
            if self.max_image_tokens and image_tokens > self.max_image_tokens:
                raise RowError(f"image {number + 1} alone takes {image_tokens} tokens; a rank holds at most "
                               f"{self.max_image_tokens}")
        return encoded._asdict() | {"text_tokens": encoded.text_tokens, "images": images}


def read_contents(row: Row, processor: Processor, image_root: str) -> tuple[list[Turn], list[bytes], list[Size]]:
    """The turns of a row, its encoded images and videos, and their sizes. RowError: it cannot be used."""
    if row.error:
        raise RowError(row.error)
    turns = read_turns(stored_turns(row.fields), stored_tools(row.fields))
    limits = processor.family.limits
    turns = with_videos(row.fields, turns)
    media = read_media(row.fields, turns, image_root, limits, row.members)
    sizes: list[Size] = []
    for name, data in media.items():
        with about(RowError, name):
            sizes.append(read_clip(data, limits) if name.startswith("video") else
                         image_size(data, limits.max_decoded_pixels))
    return turns, list(media.values()), sizes


def bad_row_reason(error: Exception) -> str:
    """Why a row cannot be used, as `shown`."""
    reason = str(error) if isinstance(error, RowError) else f"{type(error).__name__}: {first_line(error)}"
    return shown(reason)


EncodedGrids = Mapping[str, Sequence[bool]]  # by sample id, whether each of its grids is encoded here


def read_payloads(table: pa.Table, rows: list[int], encoded: EncodedGrids | None = None) -> list[dict[str, Any]]:
    """The payload of these rows of a block: numpy ids (L,), labels (L,), grids (N, 3), media (N,) and seconds (N,), and
    encoded images and videos as bytes; None for those of which `encoded` has no grid.
    """
    found = []
    for row in rows:
        record = {name: table[name][row] for name in table.column_names}
        found.append({
            "id": record["id"].as_py(), "error": record["error"].as_py(),
            "text_tokens": record["text_tokens"].as_py(), "vision_tokens": record["vision_tokens"].as_py(),
            "input_ids": np.array(record["input_ids"].values, np.int32),
            "labels": np.array(record["labels"].values, np.int32),
            "grids": np.array(record["grids"].as_py(), np.int64).reshape(-1, 3),
            "images": _media(table, row, encoded).to_pylist(),
            "media": np.array(record["media"].as_py(), np.int64),
            "seconds": np.array(record["seconds"].as_py(), np.float64)})
    return found


def cut_out(table: pa.Table, rows: list[int], encoded: EncodedGrids | None = None) -> pa.Table:
    """These rows of a block, without the bytes of images and videos of which `encoded` has no grid."""
    media = [_media(table, row, encoded) for row in rows]
    offsets = np.cumsum([0, *map(len, media)], dtype=np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.concat_arrays(media))
    place = table.column_names.index("images")
    return table.drop_columns(["images"]).take(rows).add_column(place, table.schema.field("images"), column)


def _media(table: pa.Table, row: int, encoded: EncodedGrids | None) -> pa.Array:
    """The stored images and videos of a row, not copied; null for those that are not needed here."""
    media = table["images"][row].values
    if encoded is None:
        return media
    of_grids = table["media"][row].as_py()
    needed = {number for number, here in zip(of_grids, encoded[table["id"][row].as_py()], strict=True) if here}
    if len(needed) == len(media):
        return media
    return pa.concat_arrays([media.slice(number, 1) if number in needed else pa.nulls(1, media.type)
                             for number in range(len(media))])


def _unusable(name: str, reason: str) -> dict[str, Any]:
    lists: dict[str, Any] = {key: [] for key in ("grids", "input_ids", "labels", "images", "media", "seconds")}
    return {"id": name, "error": reason, "text_tokens": 0, "vision_tokens": 0} | lists


def _block(records: list[dict[str, Any]]) -> pa.Table:
    columns = {name: [record[name] for record in records] for name in PAYLOAD.names if name != "images"}
    # Arrow's own conversion would copy the bytes several times.
    media = [encoded for record in records for encoded in record["images"]]
    stops = np.cumsum([0, *map(len, media)], dtype=np.int64)
    values = pa.Array.from_buffers(pa.large_binary(), len(media), [None, *map(pa.py_buffer, (stops, b"".join(media)))])
    ends = np.cumsum([0, *(len(record["images"]) for record in records)], dtype=np.int32)
    return pa.table({**columns, "images": pa.ListArray.from_arrays(pa.array(ends), values)}, schema=PAYLOAD)


@lru_cache(maxsize=2)
def _loaded(spec: ProcessorSpec) -> Processor:
    """One processor per process: Ray gives the next fragments to the same processes."""
    return spec.load()
