"""The folders of files that a user's later run would otherwise make again: machine code, tables of large data."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folders() -> list[Path]:
    """Where to look for a kept file, and to keep it, in this order: DHP_RAY_CACHE alone if it is set; else dhp_ray in
    the user's cache folder, and a folder of this user's among temporary files.
    """
    named = os.environ.get("DHP_RAY_CACHE")
    if named:
        return [Path(named)]
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dhp_ray"
    temporary = Path(tempfile.gettempdir()) / f"dhp_ray_{os.getuid()}"
    return [*([user] if user.is_absolute() else []), *([temporary] if _made_by_us(temporary) else [])]


def keep(name: str, write: Callable[[Path], object]) -> str | None:
    """Let `write` make a file, whole, in the first cache folder that takes it; None if one did, else why not."""
    refused = "the user has no cache folder"
    for folder in cache_folders():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, unfinished = tempfile.mkstemp(prefix=".unfinished.", dir=path.parent)
            os.close(handle)
            try:
                write(Path(unfinished))
                os.replace(unfinished, path)
            except BaseException:
                os.unlink(unfinished)
                raise
        except OSError as error:
            refused = f"{folder}: {error.strerror or error}"
        else:
            return None
    return refused


def _made_by_us(folder: Path) -> bool:
    """Whether only this user can have put files into a folder; machine code from there is run."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
