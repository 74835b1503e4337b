"""Where ranks write what goes to the run folder, and how all ranks write the run's model: each some of its files,
rank 0 also those that describe them; and how one process without Ray writes that of a kept checkpoint.

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
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.device import CPU
from dhp_ray.comm.progress import Progress
from dhp_ray.config import Config
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.model import export as layout
from dhp_ray.model.export import AllRanks, ModelFile, write_files
from dhp_ray.model.files import INDEX_FILE
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.memory.host import SMALLEST_FILE_BYTES
from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.runtime.worker.run_model import build_adapter, untrained_weights
from dhp_ray.storage import Folder, StorageError, storage_errors, sync_folder
from dhp_ray.train.engine import Engine
from dhp_ray.train.state.checkpoint import StoredValues

UNFINISHED = ".export"  # the folder in run.dir in which the ranks write the model


def save_folder(config: Config) -> Path:
    """Return where this node writes checkpoints: run.dir, or a folder for temporary files, to be uploaded."""
    folder = Folder(config.run.dir).local_path() or Path(tempfile.gettempdir())
    with storage_errors(f"run.dir: {folder}", "cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def export_folder(config: Config) -> Iterator[Path]:
    """Yield an empty folder for the model: on this node if run.dir is on an object store; else always the same one in
    run.dir, so that an export removes what a killed one has left.
    """
    if Folder(config.run.dir).local_path() is None:
        with tempfile.TemporaryDirectory(prefix="dhp_ray_", dir=save_folder(config)) as scratch:
            yield Path(scratch)
        return
    folder = save_folder(config) / UNFINISHED
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
    is over host memory (None: one rank). AbortedError: another rank failed.
    """
    store, all_ranks = Folder(config.run.dir), AllRanks(rank, group, engine.progress)
    local, place = store.local_path(), save_folder(config) / UNFINISHED
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


def export_checkpoint(
    run: Folder, config: Config, step: int, out: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the model of the checkpoint of `step` with its processor to `out`, a folder that is empty or does not exist
    and that appears whole or not at all; returns the bytes of its tensors. `config`: the run's; its `model` section
    says where to read the model now. `on_progress`: called with the numbers of files written and of all files.

    ValueError: the model cannot be built, or the checkpoint is damaged or of another model.
    """
    name = Checkpoints(run, config.checkpoint.keep).manifest(step).files
    adapter = build_adapter(replace(config, cluster=replace(config.cluster, device=CPU.name)))
    processor = ProcessorSpec.of(config.model, config.data).load()
    everything = dict(adapter.module.named_parameters())
    shapes = {key: tuple(parameter.shape) for key, parameter in everything.items() if parameter.requires_grad}
    files = layout.files_of(adapter, 1)
    on_progress(0, len(files))
    with ExitStack() as stack:
        values = StoredValues(f"{run.uri}/{name}", _local(run, name, stack), shapes, everything,
                              untrained_weights(adapter))
        place = out.with_name(f".{out.name}.unfinished")
        with storage_errors(f"out: {out}", "cannot be made"):
            shutil.rmtree(place, ignore_errors=True)  # what a killed export has left
            place.mkdir(parents=True)
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        done = 0

        def put(file: ModelFile, tensors: Mapping[str, Tensor]) -> None:
            nonlocal done
            layout.write_file(place, file, tensors)
            done += 1
            on_progress(done, len(files))

        all_ranks = AllRanks(0, None, Progress(CPU.torch_device()))
        write_files(files, values.gather, adapter.weights, 1, all_ranks, put)
        layout.write_description(adapter, files, place)
        processor.save(place)
        replace_folder(place, out)
    return sum(file.num_bytes for file in files)


def _local(run: Folder, name: str, stack: ExitStack) -> Path:
    """Return the folder of the checkpoint's files on this machine."""
    if local := run.local_path():
        return local / name
    fetched = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dhp_ray_")))
    for file in run.names(name):
        run.download(f"{name}/{file}", fetched / file)
    if not (fetched / ".metadata").exists():
        raise StorageError(f"{run.uri}/{name}: its files are gone; allowed: another checkpoint")
    return fetched


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
