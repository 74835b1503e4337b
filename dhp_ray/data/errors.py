"""Errors in data: in the whole set, or in one row of it."""

from __future__ import annotations

import pyarrow as pa

from dhp_ray.credentials import MOST_OF_ERROR, shown
from dhp_ray.errors import first_line, named_line


class DataError(ValueError):
    """Data that a run cannot use at all; the message is one line: which file or key, what is wrong, what is allowed."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message, MOST_OF_ERROR))


class RowError(ValueError):
    """One row that cannot be used; the message is one line and becomes the reason in skipped.jsonl."""


def description(error: BaseException) -> str:
    """What an error says about a file: the message of the system or of a reader; for other kinds, with the error's
    name.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error) if isinstance(error, (OSError, pa.ArrowException)) else named_line(error)
