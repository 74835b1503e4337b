"""Exports the model of a kept checkpoint to a folder in the Hugging Face format, in one process without Ray."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from dhp_ray.comm.device import CPU
from dhp_ray.comm.progress import Progress
from dhp_ray.config import Config
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.model import export as layout
from dhp_ray.model.export import AllRanks, ModelFile, write_files
from dhp_ray.runtime.records.checkpoints import Checkpoints
from dhp_ray.runtime.worker.export import replace_folder
from dhp_ray.runtime.worker.run_model import build_adapter, untrained_weights
from dhp_ray.storage import Folder, StorageError, storage_errors
from dhp_ray.train.state.checkpoint import StoredValues


def export_checkpoint(
    run: Folder, config: Config, step: int, out: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the model of the checkpoint of `step` with its processor to `out`, a folder that is empty or does not exist
    and that appears whole or not at all; returns the bytes of its tensors. `config` is the run's, with the `model`
    section that says where to read the model now. `on_progress` is called with the numbers of files written and of all
    files.

    ValueError: the model cannot be built, or the checkpoint is damaged or of another model. StorageError: something
    cannot be read or written. One line each.
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
        with storage_errors(f"out: {out}", "cannot be made"):
            place = out.with_name(f".{out.name}_{uuid.uuid4().hex}")
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
