"""Several sources as one stream, mixed row by row by their weights.

The next row comes from the source that is furthest behind its share, so every stretch of rows has each source in its
share. A source that is used up starts again, in a new order; all of its rows are seen before any is seen again. An
epoch is as many rows as all sources have together; the next epoch continues where it ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dhp_ray.data.index import sources_of
from dhp_ray.data.source_stream import Entry, SourceStream
from dhp_ray.data.stream import ORDER, Batch, BatchBuilder, Cursor, Stream, check_cursor, check_digest
from dhp_ray.schema import Data, Model


def open_stream(data: Data, model: Model, seed: int, max_tokens: int = 0, drop_last: bool = False) -> Stream | Mixture:
    """The stream of `data.path` or of `data.sources`.

    Raises:
        DataError: the data cannot be used at all.
    """
    return (Mixture if data.sources else Stream)(data, model, seed, max_tokens, drop_last)


class Mixture:
    """Batches of `data.sources`, like those that `Stream` makes of `data.path`. Ray must be initialised.

    A sample's id begins with the number of its source and, from the second pass over that source on, ends with the
    number of the pass: `0/cat`, `1/dog~2`. (An id that ends like that by itself has it in the first pass too.)

    Raises:
        DataError: a source cannot be used at all.
    """

    def __init__(self, data: Data, model: Model, seed: int, max_tokens: int = 0, drop_last: bool = False) -> None:
        self._shares = shares([source.weight for source in data.sources])
        weighted = zip(sources_of(data), self._shares.tolist(), strict=True)
        self.sources = [SourceStream(source, model, seed + number, f"{number}/", share)
                        for number, (source, share) in enumerate(weighted)]
        """By their numbers in `Batch.rows`."""
        self._path = ", ".join(source.path for source in data.sources)
        self._drop_last = drop_last
        self.num_rows = sum(source.num_rows for source in self.sources)
        self.max_tokens = max_tokens
        self._start(0, np.zeros(len(self.sources), np.int64))

    @property
    def max_tokens(self) -> int:
        return self.sources[0].max_tokens

    @max_tokens.setter
    def max_tokens(self, limit: int) -> None:
        for source in self.sources:
            source.max_tokens = limit

    @property
    def max_image_tokens(self) -> int:
        return self.sources[0].max_image_tokens

    @max_image_tokens.setter
    def max_image_tokens(self, limit: int) -> None:
        for source in self.sources:
            source.max_image_tokens = limit

    def next_batch(self, num_samples: int) -> Batch | None:
        """As `Stream.next_batch`."""
        stop = (self.epoch + 1) * self.num_rows
        if self._given.sum() == stop:
            return None
        batch = BatchBuilder()
        while self._given.sum() < stop:
            chosen = furthest_behind(self._given, self._shares)
            entry = self._peek(chosen)
            if not entry.error and len(batch.samples) == num_samples:
                break
            self.sources[chosen].take()
            self._given[chosen] += 1
            batch.add(entry, chosen)
        result = batch.finish(self.epoch, self.cursor, f"data.sources: {self._path}")
        return None if self._drop_last and len(batch.samples) < num_samples else result

    @property
    def cursor(self) -> Cursor:
        """Where the next batch begins: the number of rows that each source has given since the first epoch."""
        counts = {f"source_{number}": int(count) for number, count in enumerate(self._given)}
        files = {f"file_bytes_{number}": source.file_bytes for number, source in enumerate(self.sources)}
        digests = {f"digest_{number}": source.fragments.digest for number, source in enumerate(self.sources)}
        return {"order": ORDER, "epoch": self.epoch, "num_rows": self.num_rows} | counts | files | digests

    def restore(self, cursor: Cursor) -> None:
        """As `Stream.restore`."""
        check_cursor(cursor, self.num_rows, f"data.sources: {self._path}")
        for number, source in enumerate(self.sources):
            check_digest(cursor[f"digest_{number}"], source.fragments.digest, f"data.sources: {source.path}")
            source.file_bytes = cursor[f"file_bytes_{number}"]
        taken = [cursor[f"source_{number}"] for number in range(len(self.sources))]
        self._start(cursor["epoch"], np.array(taken, np.int64))

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        first = epoch * self.num_rows
        self._start(epoch, self._given if self._given.sum() == first else rows_given(self._shares, first))

    def close(self) -> None:
        """Stop reading ahead; a later call reads again from the beginning of the next batch."""
        self._start(self.epoch, self._given)

    def _start(self, epoch: int, given: np.ndarray) -> None:
        self.epoch, self._given = epoch, given.copy()
        for source, count in zip(self.sources, given.tolist()):
            source.start(*divmod(count, source.num_rows))

    def _peek(self, number: int) -> Entry:
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
