"""The stream of samples: lengths and references for the driver, payload in the object store for the workers.

    fragments, shuffled by (seed, epoch)        a list in the driver
      -> Ray Data: from_items, map_batches      reading tasks; one block of payload a fragment, order kept
      -> references of the blocks               never their content
      -> a small task a block                   its columns of lengths, without ids, labels and images
      -> Batch                                  samples, and where each one's payload lies

Reading runs ahead by at most two windows of fragments, whatever the object store would hold: on a small machine
it takes its time from training.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa
import ray
import ray.data

from dhp_ray.data.errors import DataError
from dhp_ray.data.index import image_root, index_fragments
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import LENGTH_COLUMNS, UNREADABLE, ReadFragments, fragment_order, read_rows
from dhp_ray.planner.plan import Sample
from dhp_ray.schema import Data, Model

__all__ = ["Batch", "Skipped", "Stream", "read_rows"]

STAGE_CPUS = 0.25
WINDOW_FRAGMENTS = 32
Cursor = dict[str, int]
# Ray Data reports every execution, one a window here, and that its progress bars are off.
_LOG_LEVELS = {"ray.data._internal.execution.streaming_executor": logging.WARNING, "ray.data._internal.progress": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row left out, and why (one line)."""

    id: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """Samples of one global batch.

    `payload` maps a sample's id to the reference of its block and its row there. `skipped` are the bad rows passed on
    the way. `cursor` is where the next batch begins; give it to `Stream.restore`.
    """

    epoch: int
    samples: list[Sample]
    payload: dict[str, tuple[ray.ObjectRef, int]] = field(repr=False)
    skipped: list[Skipped]
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class _Entry:
    """One row of the epoch: what the driver knows of it."""

    position: int
    row: int
    last_row: bool
    reference: ray.ObjectRef
    place: int
    sample: Sample
    error: str


class Stream:
    """Batches of `data.path`, in an order set by seed and epoch alone. Ray must be initialised.

    Responsibilities: the order of an epoch, the cursor, the reading stage and its limits. Not its concern: what a
    skipped row means for the run (`data.on_error`). A sample of more than `max_tokens` tokens is skipped (0: no limit).

    Raises:
        DataError: the data cannot be used at all (found before anything is read).
    """

    def __init__(self, data: Data, model: Model, seed: int, max_tokens: int = 0, drop_last: bool = False) -> None:
        self.fragments = index_fragments(data)
        processor = ProcessorSpec.of(model, data)
        processor.load()  # a model folder without a tokenizer is the user's error, and shows here
        self.num_rows = sum(fragment.num_rows for fragment in self.fragments)
        self.max_tokens = max_tokens  # may be set until the first batch is asked for
        self._reader = ReadFragments(processor, image_root(data), seed)
        self._path = data.path
        self._seed = seed
        self._drop_last = drop_last
        self._windows: deque[Iterator[ray.ObjectRef]] = deque()
        # Reading that still goes on when the interpreter ends would keep it from ending.
        weakref.finalize(self, self._windows.clear)
        for name, level in _LOG_LEVELS.items():
            logging.getLogger(name).setLevel(level)
        self._start(epoch=0, position=0, row=0)

    def next_batch(self, num_samples: int) -> Batch | None:
        """The next `num_samples` samples, at an epoch's end fewer (or, with drop_last, none); None when the epoch is over.

        Bad rows that follow the last sample belong to the batch too, so that no epoch ends in a batch without samples.

        Raises:
            DataError: a file is gone or damaged, or an epoch has no usable row.
        """
        if self._peek() is None:
            return None
        samples: list[Sample] = []
        payload: dict[str, tuple[ray.ObjectRef, int]] = {}
        skipped: list[Skipped] = []
        while (entry := self._peek()) is not None and (entry.error or len(samples) < num_samples):
            self._entries.popleft()
            self._position, self._row = (entry.position + 1, 0) if entry.last_row else (entry.position, entry.row + 1)
            if entry.error:
                skipped.append(Skipped(entry.sample.id, entry.error))
            else:
                samples.append(entry.sample)
                payload[entry.sample.id] = (entry.reference, entry.place)
        if not samples:
            raise DataError(f"data.path: {self._path} has no usable row; the first, {skipped[0].id}: {skipped[0].reason}")
        if self._drop_last and len(samples) < num_samples:
            return None
        return Batch(self.epoch, samples, payload, skipped, self.cursor)

    @property
    def cursor(self) -> Cursor:
        """Where the next batch begins: epoch, place in the epoch's order of fragments, row in that fragment's order."""
        return {"epoch": self.epoch, "fragment": self._position, "row": self._row, "num_rows": self.num_rows}

    def restore(self, cursor: Cursor) -> None:
        """Go on where a batch's cursor points.

        Raises:
            DataError: the cursor is of other data.
        """
        if cursor["num_rows"] != self.num_rows:
            raise DataError(f"data.path: {self._path} has {self.num_rows} rows, the saved run's had {cursor['num_rows']}; allowed: the same data")
        self._start(cursor["epoch"], cursor["fragment"], cursor["row"])

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._start(epoch, 0, 0)

    def close(self) -> None:
        """Stop reading ahead; a later call reads again from where the next batch begins."""
        self._start(self.epoch, self._position, self._row)

    def _start(self, epoch: int, position: int, row: int) -> None:
        self.epoch, self._position, self._row = epoch, position, row
        self._order = fragment_order(self._seed, epoch, len(self.fragments))
        self._entries: deque[_Entry] = deque()
        self._windows.clear()
        self._planned = self._fetched = position  # fragments given to a window, and blocks taken from one

    def _peek(self) -> _Entry | None:
        """The next row of the epoch, or None at its end."""
        while not self._entries:
            if self._fetched == len(self._order):
                return None
            self._plan_windows()
            self._fetch()
        return self._entries[0]

    def _plan_windows(self) -> None:
        """Have a window being read, and the next one from the middle of this one on."""
        while self._planned < len(self._order) and self._planned - self._fetched <= WINDOW_FRAGMENTS // 2:
            stop = min(self._planned + WINDOW_FRAGMENTS, len(self._order))
            self._windows.append(self._blocks(range(self._planned, stop)))
            self._planned = stop

    def _fetch(self) -> None:
        """Take the next block's reference and the lengths of its rows."""
        while (reference := next(self._windows[0], None)) is None:
            self._windows.popleft()
        lengths = ray.get(_lengths.remote(reference)).to_pylist()
        if lengths[0]["row"] == UNREADABLE:
            raise DataError(f"data.path: {lengths[0]['id']} cannot be read: {lengths[0]['error']}")
        assert all(entry["position"] == self._fetched for entry in lengths), "Ray Data returned blocks out of order"
        number = self._order[self._fetched]
        first = self._row if self._fetched == self._position else 0
        for place, entry in enumerate(lengths[first:], first):
            sample = Sample(entry["id"], entry["text_tokens"], entry["vision_tokens"], tuple((t, h, w) for t, h, w in entry["grids"]))
            last = place + 1 == self.fragments[number].num_rows
            self._entries.append(_Entry(self._fetched, place, last, reference, place, sample, entry["error"]))
        self._fetched += 1

    def _blocks(self, positions: range) -> Iterator[ray.ObjectRef]:
        """Start reading these places of the epoch's order; the references of their blocks, in order.

        The one place that uses an internal call of Ray Data: public iterators bring the blocks themselves here.
        """
        items = [{"position": position, "epoch": self.epoch, "number": self._order[position],
                  "fragment": pickle.dumps(self.fragments[self._order[position]])} for position in positions]
        dataset = ray.data.from_items(items, override_num_blocks=len(items))
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False
        dataset.context.print_on_execution_start = False
        dataset.context.target_max_block_size = None  # one block a fragment, however large
        tasks = max(1, int(ray.cluster_resources().get("CPU", 1)) // 4)
        reader = replace(self._reader, max_tokens=self.max_tokens)
        blocks = dataset.map_batches(reader, batch_size=None, batch_format="pyarrow", num_cpus=STAGE_CPUS, compute=ray.data.TaskPoolStrategy(size=tasks))
        return (entry.ref for bundle in blocks.iter_internal_ref_bundles() for entry in bundle.blocks)


@ray.remote(num_cpus=STAGE_CPUS)
def _lengths(block: pa.Table) -> pa.Table:
    return block.select(LENGTH_COLUMNS)
