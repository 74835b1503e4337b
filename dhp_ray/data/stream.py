"""The stream of samples: batches of lengths and references for the driver, payload in the object store for the workers.

Several sources are mixed row by row by their weights: the next row comes from the source that is furthest behind its
share, so every stretch of rows has each source in its share. A source that is used up starts again, in a new order; all
of its rows are seen before any is seen again. An epoch is as many rows as all sources have together; the next epoch
continues where it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import ray

from dhp_ray.data.blocks import BlockOrigin
from dhp_ray.data.errors import DataError
from dhp_ray.data.index import data_sources
from dhp_ray.data.source_stream import SourceStream, StreamRow
from dhp_ray.planner.plan.types import Sample
from dhp_ray.schema import Data, Model

Cursor = dict[str, int]
ORDER = 4
"""The version of the row order in which a cursor is a position; it is raised when the same data and seed give another
order.
"""


@dataclass(frozen=True)
class GlobalBatch:
    """Samples of one global batch.

    `payload` maps a sample's id to the reference of its block and its row there; `origins` says of every block where it
    was made, and how. `skipped` has the bad rows that were passed on the way, by id, with the reason in one line.
    `cursor` is where the next batch begins; `Stream.restore` takes it. `rows` has the number of the source and the id
    of every row, bad ones too, in the order of the stream.
    """

    epoch: int
    samples: list[Sample] = field(default_factory=list)
    payload: dict[str, tuple[ray.ObjectRef, int]] = field(default_factory=dict, repr=False)
    skipped: dict[str, str] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=dict)
    origins: dict[ray.ObjectRef, BlockOrigin] = field(default_factory=dict, repr=False)
    rows: list[tuple[int, str]] = field(default_factory=list, repr=False)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max((sample.num_tokens for sample in self.samples), default=1)


class Stream:
    """Batches of `data.path` or of `data.sources`, in an order that depends only on seed and epoch. Ray must be
    initialised.

    It makes batches and keeps the cursor; what a skipped row means for the run (`data.on_error`) is decided elsewhere.
    `answer_tokens`: see ReadFragments. With `data.sources` a sample's id begins with the number of its source and, from
    the second pass over that source on, ends with the number of the pass: `0/cat`, `1/dog~2`. (An id that ends like
    that by itself has it in the first pass too.)

    Raises:
        DataError: the data cannot be used at all (found before anything is read).
    """

    def __init__(self, data: Data, model: Model, seed: int, drop_last: bool = False, answer_tokens: int = 0) -> None:
        self._mixes = bool(data.sources)
        self._shares = shares([source.weight for source in data.sources] or [1.0])
        self.sources = [
            SourceStream(source, model, seed + number, f"{number}/" if self._mixes else "", share, answer_tokens)
            for number, (source, share) in enumerate(zip(data_sources(data), self._shares.tolist(), strict=True))]
        """By their numbers in `GlobalBatch.rows`."""
        self._where = (f"data.sources: {', '.join(source.path for source in data.sources)}" if self._mixes else
                       f"data.path: {data.path}")
        self._drop_last = drop_last
        self.num_rows = sum(source.num_rows for source in self.sources)
        self._start(0, np.zeros(len(self.sources), np.int64))

    def limit(self, max_tokens: int, max_image_tokens: int = 0) -> None:
        """Give samples of more tokens, or with a larger image, as bad rows (0: no limit); before the first row is asked
        for, or before the stream goes to another place.
        """
        for source in self.sources:
            source.limit(max_tokens, max_image_tokens)

    def next_batch(self, num_samples: int) -> GlobalBatch | None:
        """The next `num_samples` samples; fewer at the end of an epoch (with drop_last, None); None when the epoch is
        over.

        Bad rows after the last sample belong to the batch too, so that no epoch ends with a batch without samples.

        Raises:
            DataError: a file is gone or damaged, or an epoch has no usable row.
        """
        stop = (self.epoch + 1) * self.num_rows
        if self._given.sum() == stop:
            return None
        batch = GlobalBatch(self.epoch)
        while self._given.sum() < stop:
            chosen = furthest_behind(self._given, self._shares)
            entry = self._peek(chosen)
            if not entry.error and len(batch.samples) == num_samples:
                break
            self.sources[chosen].take()
            self._given[chosen] += 1
            sample_id = entry.sample.id
            batch.rows.append((chosen, sample_id))
            if entry.error:
                batch.skipped[sample_id] = entry.error
            else:
                batch.samples.append(entry.sample)
                batch.payload[sample_id] = (entry.reference, entry.place)
                batch.origins[entry.reference] = entry.origin
        if not batch.samples:
            first, reason = next(iter(batch.skipped.items()))
            raise DataError(f"{self._where} has no usable row; the first, {first}: {reason}")
        batch.cursor.update(self.cursor)
        return None if self._drop_last and len(batch.samples) < num_samples else batch

    @property
    def cursor(self) -> Cursor:
        """Where the next batch begins: the number of rows that each source has given since the first epoch; of
        `data.path`, in this epoch.
        """
        cursor = {"order": ORDER, "epoch": self.epoch, "num_rows": self.num_rows}
        if not self._mixes:
            cursor["row"] = int(self._given[0]) - self.epoch * self.num_rows
        for end, source, count in zip(self._ends, self.sources, self._given.tolist()):
            cursor |= {f"file_bytes{end}": source.file_bytes, f"digest{end}": source.fragments.digest}
            if self._mixes:
                cursor[f"source{end}"] = count
        return cursor

    def restore(self, cursor: Cursor) -> None:
        """Continue at the cursor of a batch.

        Raises:
            DataError: the cursor is of other data, or of a version that gave the rows in another order.
        """
        check_cursor(cursor, self.num_rows, self._where)
        for end, source in zip(self._ends, self.sources):
            where = f"data.sources: {source.path}" if self._mixes else self._where
            check_digest(cursor[f"digest{end}"], source.fragments.digest, where)
            source.file_bytes = cursor[f"file_bytes{end}"]
        epoch = cursor["epoch"]
        given = ([cursor[f"source{end}"] for end in self._ends] if self._mixes else
                 [epoch * self.num_rows + cursor["row"]])
        self._start(epoch, np.array(given, np.int64))

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        first = epoch * self.num_rows
        self._start(epoch, self._given if self._given.sum() == first else rows_given(self._shares, first))

    def close(self) -> None:
        """Stop reading ahead; a later call reads again from the beginning of the next batch."""
        self._start(self.epoch, self._given)

    @property
    def _ends(self) -> list[str]:
        """The ends of a cursor's keys, by source."""
        return [f"_{number}" for number in range(len(self.sources))] if self._mixes else [""]

    def _start(self, epoch: int, given: np.ndarray) -> None:
        self.epoch, self._given = epoch, given.copy()
        for source, count in zip(self.sources, given.tolist()):
            source.start(*divmod(count, source.num_rows))

    def _peek(self, number: int) -> StreamRow:
        """The next row of a source; a source that is used up starts again."""
        source = self.sources[number]
        if (entry := source.peek()) is None:
            source.start_next_epoch()
            entry = source.peek()
        assert entry is not None, "a source has rows"
        return entry


def shares(weights: Sequence[float]) -> np.ndarray:
    """(sources,) shares of the rows, with the sum 1."""
    return np.asarray(weights, np.float64) / np.sum(weights)


def furthest_behind(given: np.ndarray, parts: np.ndarray) -> int:
    """The source that gives the next row after each has given `given` rows; the first of equal ones."""
    return int(np.argmax(parts * (given.sum() + 1) - given))


def rows_given(parts: np.ndarray, num_rows: int) -> np.ndarray:
    """(sources,) rows of each source among the first `num_rows` of a mixture."""
    given = np.zeros(len(parts), np.int64)
    for _ in range(num_rows):
        given[furthest_behind(given, parts)] += 1
    return given


def check_cursor(cursor: Cursor, num_rows: int, where: str) -> None:
    """Refuse a cursor from which the rows would not continue where they ended."""
    if cursor.get("order") != ORDER:
        raise DataError(
            f"{where}: the saved run's version gave the rows in another order; allowed: another run.dir, or that "
            "version of dhp_ray"
        )
    if cursor["num_rows"] != num_rows:
        raise DataError(f"{where}: {num_rows} rows, the saved run's had {cursor['num_rows']}; allowed: the same data")


def check_digest(saved: int, digest: int, where: str) -> None:
    """Refuse data in which other rows than those of the saved run may be at its places."""
    if saved != digest:
        raise DataError(
            f"{where}: it has as many rows as the saved run's data, but other files, other contents or other row "
            "groups; allowed: the same data, or another run.dir"
        )
