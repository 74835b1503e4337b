"""The stream of samples: batches of lengths and references for the driver, payload in the object store for the workers.

    fragments, shuffled by (seed, epoch)        numbers in the driver
      -> Ray Data: from_items, map_batches      reading tasks; a block of payload a fragment, or several; order kept
      -> references of the blocks               never their content
      -> columns of each block (blocks.py)      those of lengths, without ids, labels and images
      -> interleaved (order.py)                 a window of blocks stays open; a block goes with its last row

Of the fragments that are open before the first row, those rows that come first are read first, as blocks of their own.
Reading runs ahead by at most two parts of an epoch. Each holds half of the window's bytes, or as many more as keep all
tasks busy within a sixteenth of the cluster's object store, and at least one fragment. Tasks reserve no CPU, because
workers may have reserved all, but their number is bounded.

Several sources have window, tasks and store in their shares, each at least one task, and are mixed row by row: the next
row comes from the source that is furthest behind its share. A source that is used up starts again, in a new order. An
epoch is as many rows as all sources have together; the next epoch continues where it ended.
"""

from __future__ import annotations

import heapq
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Thread
from typing import Any

import numpy as np
import ray
import ray.data
from ray.exceptions import RayError

from dhp_ray.data.blocks import LOOK_S, BlockOrigin, fetch_columns, unnoticed_loss
from dhp_ray.data.errors import BadRows, DataError
from dhp_ray.data.index import data_sources, image_root, index_fragments, mean_file_bytes
from dhp_ray.data.order import EpochOrder, Share
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.data.reader import LENGTH_COLUMNS, UNREADABLE, ReadFragments, make_item
from dhp_ray.errors import named_line
from dhp_ray.planner.plan.types import Sample
from dhp_ray.schema import Data, Model

PART_FRAGMENTS = 32
WINDOW_BYTES = 2**31  # of rows from which the next one is drawn
STORE_SHARE = 1 / 16  # of the object store, that a part may take
# Ray Data logs every execution (here one per part of the epoch), and that its progress bars are off.
_LOG_LEVELS = {"ray.data._internal.execution.streaming_executor": logging.WARNING,
               "ray.data._internal.progress": logging.ERROR}
Cursor = dict[str, int]
ORDER = 4  # the version of the row order of cursors; to be raised when the same data and seed give another order


@dataclass(frozen=True)
class GlobalBatch:
    """Samples of one global batch. `payload` maps an id to its block and row there, `origins` a block to where and how
    it was made. `skipped`: the bad rows on the way, by id, with reasons. `cursor`: where the next batch begins. `rows`:
    every row, bad ones too, in order: (source, which row of a pass over it, from 1; id).
    """

    epoch: int
    samples: list[Sample] = field(default_factory=list)
    payload: dict[str, tuple[ray.ObjectRef, int]] = field(default_factory=dict, repr=False)
    skipped: dict[str, str] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=dict)
    origins: dict[ray.ObjectRef, BlockOrigin] = field(default_factory=dict, repr=False)
    rows: list[tuple[int, int, str]] = field(default_factory=list, repr=False)

    @cached_property
    def longest(self) -> int:
        return max((sample.num_tokens for sample in self.samples), default=1)


class Stream:
    """Batches of `data.path` or of `data.sources`, in an order that depends only on seed and epoch. Ray must be
    initialised. `answer_tokens`: see ReadFragments. DataError: the data cannot be used at all (found before anything is
    read).

    With `data.sources` a sample's id begins with the number of its source and, from the second pass over that source
    on, ends with the number of the pass: `0/cat`, `1/dog~2`. (An id that ends like that by itself has it in the first
    pass too.)
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
        """Give samples of more tokens, or with a larger image, as bad rows (0: no limit), from the next start on."""
        for source in self.sources:
            source.reader = replace(source.reader, max_tokens=max_tokens, max_image_tokens=max_image_tokens)

    def next_batch(self, num_samples: int) -> GlobalBatch | None:
        """The next `num_samples` samples; fewer at the end of an epoch (with drop_last, None), None after it. Bad rows
        behind the last one belong to the batch. DataError: a file is gone or damaged, or no row usable.
        """
        stop = (self.epoch + 1) * self.num_rows
        if self._given.sum() == stop:
            return None
        batch = GlobalBatch(self.epoch)
        while self._given.sum() < stop:
            chosen = furthest_behind(self._given, self._shares)
            entry = self.sources[chosen].peek()
            if not entry.error and len(batch.samples) == num_samples:
                break
            self.sources[chosen].take()
            self._given[chosen] += 1
            sample_id = entry.sample.id
            batch.rows.append((chosen, self.sources[chosen].row, sample_id))
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
        """Where the next batch begins: rows given in this epoch; of a mixture also by each source since the start."""
        cursor = {"order": ORDER, "epoch": self.epoch, "num_rows": self.num_rows,
                  "row": int(self._given.sum()) - self.epoch * self.num_rows}
        for end, source, count in zip(self._ends, self.sources, self._given.tolist()):
            cursor |= {f"file_bytes{end}": source.file_bytes, f"digest{end}": source.fragments.digest}
            if self._mixes:
                cursor[f"source{end}"] = count
        return cursor

    def restore(self, cursor: Cursor) -> None:
        """Continue at a batch's cursor. DataError: it is of other data, or of another order of rows."""
        if cursor.get("order") != ORDER:
            raise DataError(f"{self._where}: the saved run's version gave the rows in another order; allowed: another "
                            "run.dir, or that version of dhp_ray")
        if cursor["num_rows"] != self.num_rows:
            raise DataError(f"{self._where}: {self.num_rows} rows, the saved run's had {cursor['num_rows']}; allowed: "
                            "the same data")
        for end, source in zip(self._ends, self.sources):
            if cursor[f"digest{end}"] != source.fragments.digest:
                where = f"data.sources: {source.path}" if self._mixes else self._where
                raise DataError(f"{where}: it has as many rows as the saved run's data, but other files, other "
                                "contents or other row groups; allowed: the same data, or another run.dir")
            source.file_bytes = cursor[f"file_bytes{end}"]
        epoch = cursor["epoch"]
        given = ([cursor[f"source{end}"] for end in self._ends] if self._mixes else
                 [epoch * self.num_rows + cursor["row"]])
        self._start(epoch, np.array(given, np.int64))

    def start_epoch(self, epoch: int) -> None:
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


@dataclass(frozen=True, slots=True)
class StreamRow:
    """What the driver knows of one row of the epoch, and of its block."""

    reference: ray.ObjectRef
    origin: BlockOrigin
    place: int
    sample: Sample
    error: str


class SourceStream:
    """The rows of `data.path`, in the order of an epoch; runs the reading stage within its limits. `share`: of the
    window, of the reading tasks (at least one) and of the store. `prefix`: of its ids, which makes them those of a
    mixture.
    """

    def __init__(self, data: Data, model: Model, seed: int, prefix: str, share: float, answer_tokens: int) -> None:
        self.fragments = index_fragments(data)
        self.path = data.path
        processor = ProcessorSpec.of(model, data)
        processor.load()  # raises here if the model folder has no tokenizer
        self.num_rows = self.fragments.num_rows
        self.file_bytes = mean_file_bytes(self.fragments, image_root(data))
        """Mean bytes of images and videos that a row names. The order depends on it: cursors hold it."""
        self._of_all = share
        self._window = math.ceil(data.shuffle_window * share), WINDOW_BYTES * share
        self.reader = ReadFragments(processor, image_root(data), seed, prefix=prefix, answer_tokens=answer_tokens)
        self._seed = seed
        self._parts: deque[Iterator[tuple[ray.ObjectRef | None, BlockOrigin]]] = deque()
        self._bad_rows = BadRows(data.path, self.num_rows)
        # Reading that is still running would keep the interpreter from ending.
        weakref.finalize(self, self._parts.clear)
        for name, level in _LOG_LEVELS.items():
            logging.getLogger(name).setLevel(level)
        self.start(epoch=0, row=0)

    def take(self) -> None:
        """Move past the row that `peek` returns. DataError: it is the last of too many bad rows in a row."""
        entry = self._entries.popleft()
        self.row += 1
        self._bad_rows.take(entry.sample.id, entry.error, self.row)

    def start(self, epoch: int, row: int) -> None:
        """Go to the position after the first `row` rows of an epoch."""
        self.epoch, self.row = epoch, row
        self._bad_rows.count = 0
        num_bytes = self.fragments.num_bytes + self.file_bytes * self.fragments.sizes
        self._order = EpochOrder(self._seed, epoch, self.fragments.sizes, num_bytes, *self._window)
        self._row_bytes = (num_bytes / self.fragments.sizes)[self._order.fragments]
        _, _, self._left_out = self._order.start_at(row)
        self._opening, self._next_whole = self._order.opening(row)
        self._num_shares = len(self._opening) + len(self._order) - self._next_whole
        self._open: list[tuple[float, int, int, StreamRow]] = []  # rows read, by their places in the order
        self._entries: deque[StreamRow] = deque()  # the next rows
        self._parts.clear()
        self._planned = self._fetched = 0  # shares given to a part, and those of which all blocks were taken
        self._rows_fetched = 0  # of the next share
        self._part_size = 0

    def _share(self, number: int) -> Share:
        if number < len(self._opening):
            return self._opening[number]
        return self._order.whole(number - len(self._opening) + self._next_whole)

    def peek(self) -> StreamRow:
        """The next row. The next epoch follows as part of the same pass: bad rows before it still count."""
        while not self._entries:
            if self._fetched == self._num_shares:
                count = self._bad_rows.count
                self.start(self.epoch + 1, 0)
                self._bad_rows.count = count
            self._plan_parts()
            self._fetch()
        return self._entries[0]

    def _plan_parts(self) -> None:
        """Start to read a part of the epoch ahead; the next part is started from the middle of this one on."""
        while self._planned < self._num_shares and self._planned - self._fetched <= self._part_size // 2:
            cluster = ray.cluster_resources()
            tasks = max(1, int(cluster.get("CPU", 1) // 4 * self._of_all))
            most_bytes = cluster.get("object_store_memory", 0.0) * STORE_SHARE * self._of_all
            stop = min(self._planned + self._part(tasks, most_bytes), self._num_shares)
            self._parts.append(self._blocks(range(self._planned, stop), tasks))
            self._planned, self._part_size = stop, stop - self._planned

    def _part(self, tasks: int, most_bytes: float) -> int:
        stop = min(self._planned + max(PART_FRAGMENTS, tasks), self._num_shares)
        shares = [self._share(number) for number in range(self._planned, stop)]
        held = np.cumsum([sum(self._row_bytes[part.position] * (part.stop - part.first) for part in share.parts)
                          for share in shares])
        of_window = int(np.searchsorted(held, self._window[1] / 2, side="right"))
        of_store = int(np.searchsorted(held, most_bytes, side="right"))
        return max(1, min(PART_FRAGMENTS, of_window), min(tasks, of_store))

    def _fetch(self) -> None:
        """Take the next block; rows that no row of a later share can precede are then the next ones."""
        try:
            while (found := next(self._parts[0], None)) is None:
                self._parts.popleft()
            columns, reference, origin = fetch_columns(*found, LENGTH_COLUMNS)
        except RayError as error:  # also where Ray ended a task because memory ran out
            raise DataError(f"data.path: {self.path}: a task that reads it failed: {named_line(error)}") from None
        lengths = columns.to_pylist()
        if lengths[-1]["row"] == UNREADABLE:
            raise DataError(f"data.path: {lengths[-1]['id']} cannot be read: {lengths[-1]['error']}")
        share = self._share(self._fetched)
        assert {entry["position"] for entry in lengths} <= {
            part.position for part in share.parts}, "Ray Data returned blocks out of order"
        places = {part.position: self._order.places(part.position).tolist() for part in share.parts}
        for number, entry in enumerate(lengths):
            sample = Sample(entry["id"], entry["text_tokens"], entry["vision_tokens"],
                            tuple((t, h, w) for t, h, w in entry["grids"]))
            heapq.heappush(self._open, (places[entry["position"]][entry["row"]], entry["position"], entry["row"],
                                        StreamRow(reference, origin, number, sample, entry["error"])))
        self._rows_fetched += len(lengths)
        if self._rows_fetched == share.num_rows:
            self._fetched, self._rows_fetched = self._fetched + 1, 0
        known = self._share(self._fetched).begin if self._fetched < self._num_shares else math.inf
        while self._open and self._open[0][0] < known:
            *_, row = heapq.heappop(self._open)
            if self._left_out:
                self._left_out -= 1
            else:
                self._entries.append(row)

    def _blocks(self, numbers: range, tasks: int) -> PartBlocks:
        """Start to read these shares, by an internal call: public iterators of Ray Data bring the blocks here."""
        shares = {number: self._share(number) for number in numbers}
        items = {}
        for number, share in shares.items():
            fragments = [int(self._order.fragments[part.position]) for part in share.parts]
            items[number] = make_item(self.epoch, [(part, fragment, self.fragments[fragment])
                                                   for part, fragment in zip(share.parts, fragments)])
        dataset = ray.data.from_items(list(items.values()), override_num_blocks=len(items))
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False
        dataset.context.print_on_execution_start = False
        dataset.context.target_max_block_size = self.reader.most_bytes  # blocks as the reader makes them
        blocks = dataset.map_batches(self.reader, batch_size=None, batch_format="pyarrow", num_cpus=0,
                                     compute=ray.data.TaskPoolStrategy(size=tasks))

        def entries() -> Iterator[Any]:  # Ray Data starts when the first is asked for, and returns once it is there
            for bundle in blocks.iter_internal_ref_bundles():
                yield from bundle.blocks

        return PartBlocks(entries(), ray.put((self.reader, items)), shares)


class PartBlocks:
    """The blocks of some shares, in order, as Ray Data reads them from now on. While Ray has not noticed that a node is
    gone, a share that has not come is given without a block: `fetch_columns` reads it in this process. What Ray Data
    gives of it later is dropped; if that is not the whole share, all that is left is read here.
    """

    def __init__(self, entries: Iterable[Any], source: ray.ObjectRef, shares: Mapping[int, Share]) -> None:
        self._entries: Iterator[Any] | None = iter(entries)
        self._source = source
        self._left = deque((number, share.num_rows) for number, share in shares.items())
        self._first = 0  # row of the next share with which the next block begins
        self._dropped = 0  # rows that Ray Data has still to give and nobody waits for
        self._coming: Future[Any] | None = in_thread(partial(next, self._entries), "blocks")

    def __iter__(self) -> PartBlocks:
        return self

    def __next__(self) -> tuple[ray.ObjectRef | None, BlockOrigin]:
        """The next block, and where it was made."""
        if not self._left:
            raise StopIteration
        number, num_rows = self._left[0]
        entry = self._entry()
        if entry is None:
            reference, node, stop = None, "", num_rows
            self._dropped += num_rows - self._first
        else:
            made = entry.metadata.exec_stats
            reference, node, stop = entry.ref, made.node_id if made else "", self._first + entry.metadata.num_rows
        origin = BlockOrigin(node, self._source, number, (self._first, stop))
        self._first = stop
        if stop == num_rows:
            self._left.popleft()
            self._first = 0
        return reference, origin

    def _entry(self) -> Any:
        """Ray Data's next block; None if it has to be read here."""
        while self._entries is not None:
            self._coming = self._coming or in_thread(partial(next, self._entries), "blocks")
            while not wait([self._coming], LOOK_S).done:
                if self._dropped or unnoticed_loss():
                    return None
            coming, self._coming = self._coming, None
            if not self._dropped:
                return coming.result()
            try:
                self._dropped -= coming.result().metadata.num_rows
            except (RayError, StopIteration):
                self._entries = None
            if self._dropped < 0:  # of a share that was unreadable there, only some rows came
                self._entries = None
        return None


def in_thread(call: Callable[[], Any], name: str) -> Future[Any]:
    """What `call` returns, from a thread for which the interpreter does not wait when it ends."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # for the code that waits for it
            answer.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return answer
