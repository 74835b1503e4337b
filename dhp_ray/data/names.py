"""A unique name for every row of a data set. Memory is bounded: 12 to 24 bytes a row while an index is made, and 36 at
the moment when the table grows.
"""

from __future__ import annotations

import re
from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dhp_ray.credentials import masked

MAX_LOAD = 2 / 3
MOST_CHARACTERS = 200
# What an id in a log line must not have: what a terminal obeys, line ends, what reorders text, and half characters.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Names:
    """The ids that are taken. Real data sets repeat some, but a ledger needs a unique name for each row.

    Ids are stored as 64-bit hashes. If two ids had the same hash, the second would get a longer name, as if it were
    taken.
    """

    def __init__(self) -> None:
        self._taken = HashSet()

    def claim(self, given: Any, path: str, row: int) -> str | None:
        """Return None if the given id can stay, else the name that replaces it."""
        wanted = None if given is None or isinstance(given, (dict, list)) else str(given)
        if wanted and (len(wanted) > MOST_CHARACTERS or _UNFIT.search(wanted) or masked(wanted) != wanted):
            wanted = None
        if wanted and self._taken.add(_hash(wanted)):
            return None
        name = numbered(wanted or Path(path).stem, row)
        while not self._taken.add(_hash(name)):
            name = f"{name}+"
        return name


def numbered(name: str, row: int) -> str:
    """The name of a row that has none of its own, from another row's or a file's. Of a long name the end stays: files
    of a set differ in it.
    """
    number = f"#{row:06d}"
    return _UNFIT.sub("?", name)[len(number) - MOST_CHARACTERS:] + number


class HashSet:
    """Numbers from 1 to 2**64 - 1 in a table with linear probing, 8 bytes a slot; a Python set takes about a hundred
    bytes an id.
    """

    def __init__(self) -> None:
        self._slots, self._count = array("Q", bytes(8 * 2**10)), 0

    def add(self, number: int) -> bool:
        """Add a number; returns whether it is new."""
        slots, mask = self._slots, len(self._slots) - 1
        slot = number & mask
        while (found := slots[slot]) != 0:
            if found == number:
                return False
            slot = (slot + 1) & mask
        slots[slot] = number
        self._count += 1
        if self._count > MAX_LOAD * len(slots):
            self._grow()
        return True

    def __len__(self) -> int:
        return self._count

    def _grow(self) -> None:
        slots = array("Q", bytes(8)) * (2 * len(self._slots))
        mask = len(slots) - 1
        for number in self._slots:
            if number:
                slot = number & mask
                while slots[slot]:
                    slot = (slot + 1) & mask
                slots[slot] = number
        self._slots = slots


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()) or 1
