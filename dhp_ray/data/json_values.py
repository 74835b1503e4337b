"""JSON text in a row, which may be hostile."""

from __future__ import annotations

import json
from typing import Any

MOST_VALUES = 2**21
"""Commas and brackets in a text. A value takes up to some 200 bytes of memory, and may be written in three: `[],`"""


def parsed(text: str | bytes) -> Any:
    """What JSON text holds.

    Raises:
        ValueError, RecursionError: it is not JSON, or holds too many values.
    """
    count = (sum(map(text.count, ",[{")) if isinstance(text, str) else sum(map(text.count, (b",", b"[", b"{"))))
    if count > MOST_VALUES:
        raise ValueError(f"{count} values; allowed: at most {MOST_VALUES}")
    return json.loads(text)
