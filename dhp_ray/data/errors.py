"""Errors in data: in the whole set, or in one row of it, and how many bad rows end a run."""

from __future__ import annotations

import pyarrow as pa

from dhp_ray.credentials import MOST_OF_ERROR, shown
from dhp_ray.errors import first_line, named_line

MOST_BAD_ROWS = 1000  # so many in a row, or a whole pass of them, make a source unusable


class DataError(ValueError):
    """Data that a run cannot use at all; the message is one line: which file or key, what is wrong, what is allowed."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message, MOST_OF_ERROR))


class RowError(ValueError):
    """One row that cannot be used; the message is one line and becomes the reason in skipped.jsonl."""


def description(error: BaseException) -> str:
    """What the system or a reader says about a file; of other errors also the name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error) if isinstance(error, (OSError, pa.ArrowException)) else named_line(error)


class BadRows:
    """Counts the bad rows of a source since the last good one, whether text, headers of images or decoding show it."""

    def __init__(self, path: str, num_rows: int) -> None:
        self.path, self.num_rows = path, num_rows
        self.count = 0

    def take(self, sample_id: str, reason: str, row: int) -> None:
        """Count a pass's `row`-th row, from 1; `reason`: why it is bad, if it is. DataError: one bad row too many."""
        self.count = self.count + 1 if reason else 0
        # a pass may begin with the bad rows with which the one before it, in another order, has ended
        none_usable = self.count >= self.num_rows == row
        if none_usable or self.count == MOST_BAD_ROWS:
            what = "has no usable row" if none_usable else f"has {self.count} rows in a row that cannot be used"
            raise DataError(f"data.path: {self.path} {what}; the last, {sample_id}: {reason}")
