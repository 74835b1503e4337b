"""Where a node writes what goes to the run folder: checkpoints and models."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dhp_ray.config import Config
from dhp_ray.storage import Folder, StorageError, storage_errors


def save_folder(config: Config) -> Path:
    """Return where this node writes checkpoints: run.dir itself if it is a folder, else `checkpoint.scratch`, from
    where they are uploaded.
    """
    local = Folder(config.run.dir).local_path()
    folder = local or Path(config.checkpoint.scratch or tempfile.gettempdir())
    with storage_errors(f"{'run.dir' if local else 'checkpoint.scratch'}: {folder}", "cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def export_place(config: Config) -> Path:
    """Return where the ranks of a run write its model, if run.dir is a folder."""
    return save_folder(config) / ".export"


@contextmanager
def export_folder(config: Config) -> Iterator[Path]:
    """Yield an empty folder for a model that goes to the run folder; it is on this node if the run folder is an object
    store.

    Inside run.dir it is always the same folder: an export removes what a killed one has left.
    """
    if Folder(config.run.dir).local_path() is None:
        with tempfile.TemporaryDirectory(prefix="dhp_ray_", dir=save_folder(config)) as scratch:
            yield Path(scratch)
        return
    folder = export_place(config)
    with storage_errors(f"run.dir: {folder}", "cannot be made"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_reached(folder: Folder, probe: str) -> None:
    """Refuse a run folder that is not the driver's; the driver has left the file `probe` in its own.

    Raises:
        StorageError: it is another one, or cannot be read.
    """
    try:
        folder.read(probe)
    except StorageError as error:
        raise StorageError(
            f"run.dir: {folder.uri} on {socket.gethostname()} is not the driver's: {error}; "
            "allowed: a folder or URI that every node reaches"
        ) from None
