"""A disk that is full, for tests of what happens then."""

from __future__ import annotations

import shutil
from pathlib import Path


def fill(path: Path) -> None:
    """Put a file there that takes all the room that its disk has."""
    with open(path, "wb", buffering=0) as file:
        while free := shutil.disk_usage(path).free:
            file.write(bytes(min(free, 2**20)))
