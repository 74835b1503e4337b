"""The rows of one source, in an order set by seed and epoch alone: lengths and references here, payload in the object store.

    fragments, shuffled by (seed, epoch)        a list in the driver
      -> Ray Data: from_items, map_batches      reading tasks; one block of payload a fragment, order kept
      -> references of the blocks               never their content
      -> a small task a block                   its columns of lengths, without ids, labels and images

Reading runs ahead by at most two windows of fragments, whatever the object store would hold: on a small machine
it takes its time from training. It reserves no CPU: workers may have reserved all of them, and tasks that wait for
one would never start. Its tasks are bounded in number instead.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import ray
import ray.data

from dhp_ray.data.errors import DataError
from dhp_ray.data.index import image_root, index_fragments
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import LENGTH_COLUMNS, UNREADABLE, ReadFragments, fragment_order
from dhp_ray.planner.plan import Sample
from dhp_ray.schema import Data, Model

WINDOW_FRAGMENTS = 32
# Ray Data reports every execution, one a window here, and that its progress bars are off.
_LOG_LEVELS = {"ray.data._internal.execution.streaming_executor": logging.WARNING, "ray.data._internal.progress": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the epoch: what the driver knows of it."""

    position: int
    row: int
    last_row: bool
    reference: ray.ObjectRef
    place: int
    sample: Sample
    error: str


class SourceStream:
    """The rows of `data.path`, one after the other. Ray must be initialised.

    Responsibilities: the order of an epoch, the reading stage and its limits. A sample of more than `max_tokens` tokens, or
    with an image of more than `max_image_tokens`, is a bad row (0: no limit); both may be set until the first row is asked for.
    Ids begin with `prefix`; with one, they also end with the number of the epoch from the second on.

    Raises:
        DataError: the data cannot be used at all (found before anything is read).
    """

    def __init__(self, data: Data, model: Model, seed: int, prefix: str = "") -> None:
        self.fragments = index_fragments(data)
        processor = ProcessorSpec.of(model, data)
        processor.load()  # a model folder without a tokenizer is the user's error, and shows here
        self.num_rows = self.fragments.num_rows
        self.max_tokens = self.max_image_tokens = 0
        self._reader = ReadFragments(processor, image_root(data), seed, prefix=prefix)
        self._seed = seed
        self._windows: deque[Iterator[ray.ObjectRef]] = deque()
        # Reading that still goes on when the interpreter ends would keep it from ending.
        weakref.finalize(self, self._windows.clear)
        for name, level in _LOG_LEVELS.items():
            logging.getLogger(name).setLevel(level)
        self.start(epoch=0, position=0, row=0)

    def take(self) -> None:
        """Leave the row that `peek` shows behind."""
        entry = self._entries.popleft()
        self.position, self.row = (entry.position + 1, 0) if entry.last_row else (entry.position, entry.row + 1)

    def start_at(self, epoch: int, num_rows: int) -> None:
        """Go to where an epoch has given so many rows."""
        ends = np.cumsum(self.fragments.sizes[fragment_order(self._seed, epoch, len(self.fragments))])
        position = int(np.searchsorted(ends, num_rows, side="right"))
        self.start(epoch, position, num_rows - int(ends[position - 1] if position else 0))

    def start(self, epoch: int, position: int, row: int) -> None:
        """Go to a row of an epoch: the place of its fragment in the order, and its own there."""
        self.epoch, self.position, self.row = epoch, position, row
        self._order = fragment_order(self._seed, epoch, len(self.fragments))
        self._entries: deque[Entry] = deque()
        self._windows.clear()
        self._planned = self._fetched = position  # fragments given to a window, and blocks taken from one

    def peek(self) -> Entry | None:
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
        first = self.row if self._fetched == self.position else 0
        for place, entry in enumerate(lengths[first:], first):
            sample = Sample(entry["id"], entry["text_tokens"], entry["vision_tokens"], tuple((t, h, w) for t, h, w in entry["grids"]))
            last = place + 1 == self.fragments.sizes[number]
            self._entries.append(Entry(self._fetched, place, last, reference, place, sample, entry["error"]))
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
        reader = replace(self._reader, max_tokens=self.max_tokens, max_image_tokens=self.max_image_tokens)
        blocks = dataset.map_batches(reader, batch_size=None, batch_format="pyarrow", num_cpus=0, compute=ray.data.TaskPoolStrategy(size=tasks))
        return (entry.ref for bundle in blocks.iter_internal_ref_bundles() for entry in bundle.blocks)


@ray.remote(num_cpus=0)
def _lengths(block: pa.Table) -> pa.Table:
    return block.select(LENGTH_COLUMNS)
