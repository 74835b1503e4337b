"""The order of an epoch: fragments are read in a random order, and the rows of the fragments that are open at a time (a
window of them) are interleaved.

Fragments lie on a line, each as long as its share of the window. The rows of a fragment are spread, evenly but with
some randomness, over a stretch of the line: it begins where the fragment begins, and is as long as a window. The first
fragments all begin at once, so that the first rows come from many of them. The rows of the epoch are ordered by their
places on the line:

    fragment 0  |x  x   x|
    fragment 1  |x   x    x|
    fragment 2  |  x   x    x |               the first stretches are shorter: a first batch needs no whole window
    fragment 3         |x     x   x |
    fragment 4           |x   x     x  |

So a fragment is needed only during its stretch, and all rows before the begin of a fragment are known once the
fragments before it have been read. The order is a function of seed, epoch, the sizes of the fragments and the window;
it does not depend on the workers or on when anything is read.

The order of the fragments is random too, but fragments that follow one another are from different parts of the data
set, so that a few of them represent a set that is sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FIRST_FRAGMENTS = 16  # so many fragments are open before the first row, or as many as the window holds

FIRST_ROWS, ROWS_AT_ONCE = 128, 64
"""The rows that are read first, of all fragments open at the start; the fewest rows that a task is started for."""

HALVINGS = 4  # fragments that follow one another are from different ones of 2**HALVINGS parts of the data set


class RowRange(NamedTuple):
    """Rows of the fragment at this position of the order: those from `first` to `stop` in its own order."""

    position: int
    first: int
    stop: int


class Share(NamedTuple):
    """Rows that are read at once. No row of a share, or of a later one, has a place on the line before `begin`."""

    parts: list[RowRange]
    begin: float

    @property
    def num_rows(self) -> int:
        return sum(part.stop - part.first for part in self.parts)


class EpochOrder:
    """The order of an epoch's rows. `sizes`, `num_bytes`: (fragments,) rows and bytes of each. At most `window_rows`
    rows of about `window_bytes` are open at a time, and one fragment more.
    """

    def __init__(
        self, seed: int, epoch: int, sizes: np.ndarray, num_bytes: np.ndarray, window_rows: int, window_bytes: float
    ) -> None:
        self._seed = [seed, epoch]
        self.fragments = fragment_order(seed, epoch, len(sizes))
        """(fragments,) their numbers, in the order in which they are read."""
        self.sizes = sizes[self.fragments]
        shares = np.maximum(self.sizes / max(1, window_rows), num_bytes[self.fragments] / window_bytes)
        before = np.concatenate([[0.0], np.cumsum(shares)])
        num_first = max(1, min(FIRST_FRAGMENTS, int(np.searchsorted(before, 1.0, side="right")) - 1))
        self.begins = np.where(np.arange(len(sizes)) < num_first, 0.0, before[:-1])
        """(fragments,) where the stretch of each begins."""
        # The first stretches end one after the other; the others grow by what lies before them, up to a window.
        self._stops = before[:-1] + np.minimum(1, before[:-1] + before[num_first])
        self._rows_before = np.concatenate([[0], np.cumsum(self.sizes)])

    def __len__(self) -> int:
        return len(self.fragments)

    def places(self, position: int) -> np.ndarray:
        """(rows,) the places on the line of the rows of the fragment at this position of the order, ascending."""
        begin, stop, size = self.begins[position], self._stops[position], self.sizes[position]
        chance = np.random.default_rng([*self._seed, int(self.fragments[position]), 1]).random(size)
        # Rounding must not move a row beyond its stretch: `start_at` relies on that.
        return np.minimum(begin + (stop - begin) * (np.arange(size) + chance) / size, np.nextafter(stop, begin))

    def start_at(self, num_rows: int) -> tuple[int, float, int]:
        """After `num_rows` rows: the fragment to read from, the place before which rows are left out, how many more."""
        low, high = 0, len(self) - 1  # finds the last fragment with at most `num_rows` rows before its begin
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._rows_until(middle) <= num_rows else (low, middle - 1)
        return self._first_open(low), float(self.begins[low]), num_rows - self._rows_until(low)

    def opening(self, num_rows: int) -> tuple[list[Share], int]:
        """What is read first after `num_rows` rows, and the position of the next fragment, read whole as all others."""
        first, start, left_out = self.start_at(num_rows)
        stop = int(np.searchsorted(self.begins, start, side="right"))
        known = np.concatenate([self.places(position) for position in range(first, stop)])
        known = known[known >= start]
        while stop < len(self) and (known < self.begins[stop]).sum() <= left_out + FIRST_ROWS:
            known, stop = np.concatenate([known, self.places(stop)]), stop + 1
        known = np.sort(known[known < self.begins[stop]] if stop < len(self) else known)
        shares: list[Share] = []
        end, num_read = start, left_out + FIRST_ROWS
        while end < np.inf:
            begin, end = end, known[num_read] if num_read < len(known) else np.inf
            num_read += num_read  # each time twice as many
            parts: list[RowRange] = []
            for position in range(first, stop):
                part = RowRange(position, *np.searchsorted(self.places(position), (begin, end)).tolist())
                if part.stop > part.first:
                    parts.append(part)
                if parts and (Share(parts, 0).num_rows >= ROWS_AT_ONCE or position == stop - 1):
                    shares.append(Share(parts, max(begin, float(self.begins[parts[0].position]))))
                    parts = []
        return shares, stop

    def whole(self, position: int) -> Share:
        return Share([RowRange(position, 0, int(self.sizes[position]))], float(self.begins[position]))

    def _first_open(self, position: int) -> int:
        """The position of the first fragment whose stretch reaches the begin of the one at `position`."""
        return int(np.searchsorted(self._stops[:position], self.begins[position], side="right"))

    def _rows_until(self, position: int) -> int:
        """The number of rows before the begin of the fragment at `position`."""
        first = self._first_open(position)
        begin = self.begins[position]
        of_open = sum(int((self.places(number) < begin).sum()) for number in range(first, position))
        return int(self._rows_before[first]) + of_open


def fragment_order(seed: int, epoch: int, num_fragments: int) -> np.ndarray:
    """(fragments,) the numbers of an epoch's fragments, in the order in which they are read."""
    return _spread(np.arange(num_fragments), np.random.default_rng([seed, epoch]), HALVINGS)


def _spread(numbers: np.ndarray, chance: np.random.Generator, halvings: int) -> np.ndarray:
    """The numbers in a random order that alternates between both halves, and again within each."""
    if not halvings or len(numbers) < 2:
        return chance.permutation(numbers)
    middle = (len(numbers) + chance.integers(2)) // 2
    halves = [_spread(half, chance, halvings - 1) for half in (numbers[:middle], numbers[middle:])]
    if chance.integers(2):
        halves.reverse()
    spread = np.empty_like(numbers)
    spread[::2], spread[1::2] = sorted(halves, key=len, reverse=True)
    return spread


def row_order(seed: int, epoch: int, number: int, num_rows: int) -> list[int]:
    """The rows of a fragment, in the order in which an epoch gives them."""
    return [int(row) for row in np.random.default_rng([seed, epoch, number]).permutation(num_rows)]
