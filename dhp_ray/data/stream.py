"""The stream of samples: batches of lengths and references for the driver, payload in the object store for the workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import ray
import ray.data

from dhp_ray.data.blocks import Origin
from dhp_ray.data.errors import DataError
from dhp_ray.data.reader import read_payloads
from dhp_ray.data.source_stream import Entry, SourceStream
from dhp_ray.planner.plan.types import Sample
from dhp_ray.schema import Data, Model

__all__ = ["Batch", "BatchBuilder", "Cursor", "Skipped", "Stream", "read_payloads"]

Cursor = dict[str, int]
ORDER = 4
"""The version of the row order in which a cursor is a position; it is raised when the same data and seed give another
order.
"""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that was left out, and why (one line)."""

    id: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """Samples of one global batch.

    `payload` maps a sample's id to the reference of its block and its row there; `origins` says of every block where it
    was made, and how. `skipped` are the bad rows that were passed on the way. `cursor` is where the next batch begins;
    `Stream.restore` takes it. `rows` has the number of the source and the id of every row, bad ones too, in the order
    of the stream.
    """

    epoch: int
    samples: list[Sample]
    payload: dict[str, tuple[ray.ObjectRef, int]] = field(repr=False)
    skipped: list[Skipped]
    cursor: Cursor
    origins: dict[ray.ObjectRef, Origin] = field(default_factory=dict, repr=False)
    rows: list[tuple[int, str]] = field(default_factory=list, repr=False)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max((sample.num_tokens for sample in self.samples), default=1)


class BatchBuilder:
    """Collects the rows of one batch."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._payload: dict[str, tuple[ray.ObjectRef, int]] = {}
        self._origins: dict[ray.ObjectRef, Origin] = {}
        self._skipped: list[Skipped] = []
        self._rows: list[tuple[int, str]] = []

    def add(self, entry: Entry, source: int = 0) -> None:
        self._rows.append((source, entry.sample.id))
        if entry.error:
            self._skipped.append(Skipped(entry.sample.id, entry.error))
        else:
            self.samples.append(entry.sample)
            self._payload[entry.sample.id] = (entry.reference, entry.place)
            self._origins[entry.reference] = entry.origin

    def finish(self, epoch: int, cursor: Cursor, where: str) -> Batch:
        if not self.samples:
            raise DataError(f"{where} has no usable row; the first, {self._skipped[0].id}: {self._skipped[0].reason}")
        return Batch(epoch, self.samples, self._payload, self._skipped, cursor, self._origins, self._rows)


class Stream:
    """Batches of `data.path`, in an order that depends only on seed and epoch. Ray must be initialised.

    It makes batches and keeps the cursor; what a skipped row means for the run (`data.on_error`) is decided elsewhere.
    Limits and `answer_tokens` are as in `SourceStream`.

    Raises:
        DataError: the data cannot be used at all (found before anything is read).
    """

    def __init__(self, data: Data, model: Model, seed: int, max_tokens: int = 0, drop_last: bool = False,
                 answer_tokens: int = 0) -> None:
        self._rows = SourceStream(data, model, seed, answer_tokens=answer_tokens)
        self.fragments, self.num_rows = self._rows.fragments, self._rows.num_rows
        self.max_tokens = max_tokens
        self._path = data.path
        self._drop_last = drop_last

    @property
    def sources(self) -> list[SourceStream]:
        """The sources, by their numbers in `Batch.rows`."""
        return [self._rows]

    @property
    def epoch(self) -> int:
        return self._rows.epoch

    @property
    def max_tokens(self) -> int:
        return self._rows.max_tokens

    @max_tokens.setter
    def max_tokens(self, limit: int) -> None:
        self._rows.max_tokens = limit

    @property
    def max_image_tokens(self) -> int:
        return self._rows.max_image_tokens

    @max_image_tokens.setter
    def max_image_tokens(self, limit: int) -> None:
        self._rows.max_image_tokens = limit

    def next_batch(self, num_samples: int) -> Batch | None:
        """The next `num_samples` samples; fewer at the end of an epoch (with drop_last, None); None when the epoch is
        over.

        Bad rows after the last sample belong to the batch too, so that no epoch ends with a batch without samples.

        Raises:
            DataError: a file is gone or damaged, or an epoch has no usable row.
        """
        if self._rows.peek() is None:
            return None
        batch = BatchBuilder()
        while (entry := self._rows.peek()) is not None and (entry.error or len(batch.samples) < num_samples):
            self._rows.take()
            batch.add(entry)
        result = batch.finish(self.epoch, self.cursor, f"data.path: {self._path}")
        return None if self._drop_last and len(batch.samples) < num_samples else result

    @property
    def cursor(self) -> Cursor:
        """Where the next batch begins: the epoch, and the number of rows that it has given."""
        return {"order": ORDER, "epoch": self.epoch, "row": self._rows.row, "num_rows": self.num_rows,
                "file_bytes": self._rows.file_bytes, "digest": self.fragments.digest}

    def restore(self, cursor: Cursor) -> None:
        """Continue at the cursor of a batch.

        Raises:
            DataError: the cursor is of other data, or of a version that gave the rows in another order.
        """
        check_cursor(cursor, self.num_rows, f"data.path: {self._path}")
        check_digest(cursor["digest"], self.fragments.digest, f"data.path: {self._path}")
        self._rows.file_bytes = cursor["file_bytes"]
        self._rows.start(cursor["epoch"], cursor["row"])

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._rows.start(epoch, 0)

    def close(self) -> None:
        """Stop reading ahead; a later call reads again from the beginning of the next batch."""
        self._rows.start(self.epoch, self._rows.row)


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
