"""When bad rows end a run. One rule for all of them, whatever shows that a row is bad: its text, the headers of its
images, or their decoding a batch later.
"""

from __future__ import annotations

from dhp_ray.data.errors import DataError

MOST_BAD_ROWS = 1000
"""So many bad rows in a row, or all rows of a smaller source, and the source cannot be used: whatever holds its images
no longer answers, say.
"""


class BadRows:
    """Counts the bad rows of a source since the last one that could be used. `path` and `num_rows` are the source's."""

    def __init__(self, path: str, num_rows: int) -> None:
        self.path, self.num_rows = path, num_rows
        self.count = 0

    def take(self, sample_id: str, reason: str) -> None:
        """Count the next row of the source; `reason`: why it is bad, empty if it can be used.

        Raises:
            DataError: it is the last of too many bad rows in a row.
        """
        self.count = self.count + 1 if reason else 0
        if self.count == min(MOST_BAD_ROWS, self.num_rows):
            what = ("has no usable row" if self.count == self.num_rows
                    else f"has {self.count} rows in a row that cannot be used")
            raise DataError(f"data.path: {self.path} {what}; the last, {sample_id}: {reason}")
