"""Where ranks write what goes to the run folder, and how all ranks write the run's model: each some of its files,
rank 0 also those that describe them.

    run.dir on a file system    all write into one folder inside it, which takes the model's name when it is whole
    on an object store          each writes a file into a folder on its node and uploads it; the index comes last
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from dhp_ray.config import Config
from dhp_ray.model import export as layout
from dhp_ray.model.export import AllRanks, ModelFile, write_files
from dhp_ray.model.files import INDEX_FILE
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.memory.host import SMALLEST_FILE_BYTES
from dhp_ray.storage import Folder, StorageError, storage_errors, sync_folder
from dhp_ray.train.engine import Engine


def save_folder(config: Config) -> Path:
    """Return where this node writes checkpoints: run.dir, or a folder for temporary files, to be uploaded."""
    folder = Folder(config.run.dir).local_path() or Path(tempfile.gettempdir())
    with storage_errors(f"run.dir: {folder}", "cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def export_place(config: Config) -> Path:
    """Return where the ranks of a run write its model, if run.dir is a folder."""
    return save_folder(config) / ".export"


@contextmanager
def export_folder(config: Config) -> Iterator[Path]:
    """Yield an empty folder for a model that goes to the run folder. On an object store it is on this node; else always
    the same one inside run.dir: an export removes what a killed one has left.
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
    """Refuse a run folder that is not the driver's; the driver has left the file `probe` in its own."""
    try:
        folder.read(probe)
    except StorageError as error:
        raise StorageError(f"run.dir: {folder.uri} on {socket.gethostname()} is not the driver's: {error}; allowed: a "
                           "folder or URI that every node reaches") from None


def export_model(
    config: Config, adapter: LanguageModel, engine: Engine, rank: int, world_size: int,
    group: dist.ProcessGroup | None, save_processor: Callable[[Path], None], name: str,
    smallest_bytes: int = SMALLEST_FILE_BYTES,
) -> None:
    """Write the model of all ranks with its processor to the folder `name` of the run. Every rank calls this; `group`
    is over host memory (None: one rank). ModelError, StorageError, AbortedError (another rank failed): one line.
    """
    store, all_ranks = Folder(config.run.dir), AllRanks(rank, group, engine.progress)
    local, place = store.local_path(), export_place(config)
    files: list[ModelFile] = []
    with ExitStack() as stack:
        def begin() -> None:
            nonlocal place
            files.extend(layout.files_of(adapter, world_size, smallest_bytes))
            if rank == 0 or local is None:
                place = stack.enter_context(export_folder(config))
            if rank == 0 and local is None:
                store.delete(name)  # files of two exports would load as a model that never existed

        def put(file: ModelFile, tensors: Mapping[str, Tensor]) -> None:
            layout.write_file(place, file, tensors)
            if local is None:
                store.upload(place / file.name, f"{name}/{file.name}")
                (place / file.name).unlink()

        def end() -> None:
            if rank:
                return
            layout.write_description(adapter, files, place)
            save_processor(place)
            if local is not None:
                replace_folder(place, local / name)
                return
            for file in sorted(place.iterdir(), key=lambda file: file.name == INDEX_FILE):
                store.upload(file, f"{name}/{file.name}")

        all_ranks.run(begin)
        write_files(files, engine.gather, adapter.weights, world_size, all_ranks, put)
        all_ranks.run(end)


def replace_folder(folder: Path, target: Path) -> None:
    """Write a folder safely to the disk and let it take the place of `target` beside it."""
    old = folder.with_name(f"{folder.name}_replaced")
    with storage_errors(str(target), "cannot be written"):
        for file in folder.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(folder)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            os.replace(target, old)
        os.replace(folder, target)
        sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)
