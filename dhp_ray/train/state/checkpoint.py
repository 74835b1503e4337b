"""Checkpoints by parameter name: written in the background, read on any number of ranks with any buckets.

    checkpoints/step_000020/
        generation_3/                of the ranks that save; an aborted generation has files of its own
            parameters.json          state version, the updates of the vision encoder, the shape of every trained
                                     parameter, and the fingerprint of the files of the parameters that are not trained
            .metadata, __R_0.distcp  torch.distributed.checkpoint: `value.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`, each
                                     the flattened parameter in fp32, of which rank R wrote the intervals that it owns
        manifest.json                the driver's, written last

A rank writes directly into a run folder on a file system; for an object store it writes into a folder on its node and
uploads from there. Frozen parameters are not in a checkpoint: they come from the model's own files or seed.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import planner as planners
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dhp_ray.comm.ranks import all_well
from dhp_ray.comm.world import is_peer_loss
from dhp_ray.errors import named_line
from dhp_ray.model.weights import StoredWeights
from dhp_ray.run_folder import CHECKPOINTS_FOLDER, MANIFEST_FILE, checkpoint_folder, step_of, tensors_folder
from dhp_ray.storage import STORAGE_TIMEOUT_S, Folder, StorageError, replacing, sync_folder
from dhp_ray.train.engine import Engine
from dhp_ray.train.state.shards import CPU, ShardState

DESCRIPTION = "parameters.json"
INDEX = ".metadata"
"""torch's file of where each interval lies."""
POLL_S = 0.1
"""Seconds after which a wait for a save looks for an abort."""


class DamagedError(ValueError):
    """The files of a checkpoint cannot be read."""


class Checkpointer:
    """Saves and loads one rank's part of the state. All ranks call `begin` and `load` alike, in the same order.

    A save runs in a thread of its own on `group`, a gloo group that nothing else uses: its collectives never mix with
    training's. They wait for the slowest rank's storage, so the group's timeout is STORAGE_TIMEOUT_S. A collective that
    fails ends the group: `renew` it after a save that failed, before the next one. The ranks plan their first save
    together, which takes rank 0 seconds, and write later ones like it.

    Files go to the run's `folder`, by way of `scratch`, a folder on this node, if `folder` is an object store. `base`:
    the files of the parameters that are not trained; None: there are none.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        group: dist.ProcessGroup | None,
        scratch: Path | None,
        folder: Folder,
        generation: int = 0,
        base: StoredWeights | None = None,
    ) -> None:
        self.engine, self.rank, self.group = engine, rank, group
        self.scratch, self.folder, self.generation, self.base = scratch, folder, generation, base
        self._files: WrittenFiles | None = None  # of the last whole save; all ranks have theirs, or none
        self._thread: Thread | None = None
        self._left = Event()
        self._results: SimpleQueue[tuple[int, str]] = SimpleQueue()

    def begin(self, step: int) -> None:
        """Copy the current state and start to write it for the step; waits for a save under way."""
        self.finish()
        staged = ShardState.empty(self.engine.shard_size)
        staged.copy_(self.engine.current, lambda: self.engine.progress.mark("copy of the state for a checkpoint"))
        self._thread = Thread(target=self._write, args=(step, staged, self.group), name=f"save-{step}", daemon=True)
        self._thread.start()

    def poll(self) -> tuple[list[int], str]:
        """Return the steps of which this rank has written its part, and what failed here, each since the last call.

        A save that failed on some ranks is reported by those, in one line; the other ranks report neither success nor
        failure.
        """
        saved: list[int] = []
        errors: list[str] = []
        while not self._results.empty():
            step, error = self._results.get()
            if error:
                errors.append(f"step {step}: {error}")
            else:
                saved.append(step)
        return saved, "; ".join(errors)

    def finish(self) -> None:
        """Wait for a save under way; `poll` tells how it went. Raises AbortedError after an abort."""
        while self._thread is not None:
            self._thread.join(POLL_S)
            if not self._thread.is_alive():
                self._thread = None
            else:
                self.engine.progress.check()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait at most `timeout_s` for a save under way, then abandon it. This is the last call, and peers may be dead.
        Not a collective.

        An abandoned save uploads no further file. Its thread ends when its group's sockets are closed, which is when
        its peers are gone or have destroyed that group.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._left.set()
        self._thread, self.group = None, None

    def renew(self, group: dist.ProcessGroup) -> None:
        """Go on with another group after a save that failed; every rank calls this alike, with no save under way."""
        self.group, self._files = group, None

    def load(self, name: str) -> None:
        """Load the state from `name`, a `tensors_folder`, saved by any number of ranks. ValueError: it is of another
        model, or of other weights that are not trained, or cannot be read; the engine's state is then as before.
        StorageError: one of its files is missing.
        """
        self.finish()
        try:
            self._load(name)
        except (DamagedError, StorageError) as error:
            raise type(error)(f"{error}; {self._way_on(name)}") from None

    def _load(self, name: str) -> None:
        description = described(name, self.folder.read(f"{name}/{DESCRIPTION}"), self.engine.shapes, self.base)
        state = ShardState.zeros(self.engine.shard_size, CPU)
        local = self.folder.local_path()
        fetched = None if local else self._staged("load")
        try:
            source = local / name if local else self._fetch(name, state, self._staged("load"))
            load_entries(self._entries(state), name, source, self.group)
        finally:
            if fetched:
                shutil.rmtree(fetched, ignore_errors=True)
        state.version = int(description["state_version"])
        # earlier versions updated the vision encoder in every update
        state.vision_updates = int(description.get("vision_updates", state.version))
        self.engine.load_state(state)

    def _way_on(self, name: str) -> str:
        """What to do if the files of a checkpoint, the newest one, are damaged."""
        here = "/".join(name.split("/")[:2])
        steps = (step_of(found) for found in self.folder.names(CHECKPOINTS_FOLDER))
        whole = [step for step in steps if step is not None and checkpoint_folder(step) != here
                 and self.folder.exists(f"{checkpoint_folder(step)}/{MANIFEST_FILE}")]
        way = f"goes on after step {max(whole)}" if whole else "begins from the first step"
        return f"if it is damaged, delete {here}, and a new start {way}"

    def _entries(self, state: ShardState) -> dict[str, Intervals]:
        """The pieces of a state by kind and parameter name; they share its memory."""
        entries: dict[str, Intervals] = {}
        for kind, tensor in state.tensors().items():
            for piece in self.engine.pieces:
                size = math.prod(self.engine.shapes[piece.name])
                entry = entries.setdefault(f"{kind}.{piece.name}", Intervals(size, {}))
                entry.parts[piece.start] = tensor[piece.shard]
        return entries

    def _write(self, step: int, state: ShardState, group: dist.ProcessGroup | None) -> None:
        """The thread of a save; `poll` tells how it went."""
        name, local, begun = tensors_folder(step, self.generation), self.folder.local_path(), monotonic()
        folder = local / name if local else self._staged(f"step_{step:06d}_{uuid4().hex}")
        try:
            error = self._saved(name, state, group, folder)
        except BaseException as failure:
            error = named_line(failure)
            if is_peer_loss(failure):
                error = (f"after {monotonic() - begun:.0f} s here, not all ranks had written their parts (they wait "
                         f"{STORAGE_TIMEOUT_S:g} s for one another): {error}")
            if local:
                self._withdraw(name, folder)
        finally:
            if not local:
                shutil.rmtree(folder, ignore_errors=True)
        if error is not None:
            self._results.put((step, error))

    def _saved(self, name: str, state: ShardState, group: dist.ProcessGroup | None, folder: Path) -> str | None:
        """Write every rank's part, or leave none: returns "" if written, what failed on this rank, or None if another
        rank failed or the save was abandoned before it began.

        A peer must not wait for this rank in vain: what may fail here happens inside torch's steps, or is caught. If a
        collective itself fails, or the save was abandoned, this rank returns: peers are freed when its group is closed.
        """
        if self._left.is_set():  # its group may be gone: torch would take each rank for the only one
            return None
        error: str | None = ""
        local, before, planner = self.folder.local_path(), self._files, SavePlanner()
        try:
            writer = Writer(folder, sync_files=local is not None)  # else the upload is what makes files safe
            if before is None:
                dcp.save(self._entries(state), storage_writer=writer, planner=planner, process_group=group,
                         no_dist=group is None)
        except CheckpointException as failure:  # on all ranks alike
            error = named_line(failure.failures[self.rank][0]) if self.rank in failure.failures else None
        else:
            try:
                if before is None:
                    before = writer.files(planner, self.rank == 0)
                else:
                    writer.write_as(before, self._entries(state), planner)
                if self.rank == 0 and not self._left.is_set():
                    self._describe(name, state)
                if local:
                    sync_folder(folder)
                else:
                    self._upload(name, folder)
            except BaseException as failure:
                error = named_line(failure)
        if self._left.is_set():
            if local:
                self._withdraw(name, folder)
            return error
        if not all_well(error == "", group):
            self._withdraw(name, folder)
            return error or None
        self._files = before
        return ""

    def _describe(self, name: str, state: ShardState) -> None:
        shapes = {parameter: list(shape) for parameter, shape in self.engine.shapes.items()}
        self.folder.write(f"{name}/{DESCRIPTION}",
                          json.dumps({"state_version": state.version, "vision_updates": state.vision_updates,
                                      "shapes": shapes,
                                      "base": self.base.fingerprint if self.base else ""}).encode())

    def _upload(self, name: str, folder: Path) -> None:
        for file in sorted(folder.iterdir()):
            if not self._left.is_set():
                self.folder.upload(file, f"{name}/{file.name}")

    def _withdraw(self, name: str, folder: Path) -> None:
        """Remove this rank's files of a save that failed: on a full disk, the logs and the next save need the room.

        What cannot be removed is deleted when the next save is whole; the failure of this one is reported all the same.
        """
        with suppress(OSError):
            for file in self.folder.names(name):
                if file.startswith(f"__{self.rank}_") or (self.rank == 0 and not file.startswith("__")):
                    self.folder.delete(f"{name}/{file}")
            folder.rmdir()  # succeeds on the last rank to get here

    def _staged(self, name: str) -> Path:
        """Return a folder on this node, for an object store."""
        assert self.scratch is not None, "an object store needs a folder on this node"
        return self.scratch / name

    def _fetch(self, name: str, state: ShardState, fetched: Path) -> Path:
        """Download the checkpoint's files that this rank needs; return their folder."""
        self.folder.download(f"{name}/{INDEX}", fetched / INDEX)
        metadata = dcp.FileSystemReader(fetched).read_metadata()
        for file in sorted(needed_files(metadata, self._entries(state))):
            self.folder.download(f"{name}/{file}", fetched / file)
        return fetched


def compare_shapes(
    checkpoint: str, saved: Mapping[str, tuple[int, ...]], model: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError, with the first parameter that differs, unless a checkpoint is of this model."""
    for name in [*model, *(name for name in saved if name not in model)]:
        if saved.get(name) != model.get(name):
            here, there = (str(shapes[name]) if name in shapes else "none" for shapes in (model, saved))
            raise ValueError(
                f"{checkpoint}: of another model: trained parameter {name} has shape {here} in the model and {there} "
                "in the checkpoint"
            )


def described(
    checkpoint: str, content: bytes, shapes: Mapping[str, tuple[int, ...]], base: StoredWeights | None
) -> dict[str, Any]:
    """The `content` of a checkpoint's DESCRIPTION. ValueError: it is damaged, or of other shapes or another `base`."""
    try:
        description: dict[str, Any] = json.loads(content)
        saved = {key: tuple(shape) for key, shape in description["shapes"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{checkpoint}/{DESCRIPTION}: cannot be read: {named_line(error)}") from None
    compare_shapes(checkpoint, saved, shapes)
    if description.get("base") and base is not None and base.fingerprint != description["base"]:
        raise ValueError(f"{checkpoint}: trained beside other weights than those in model.path, {base.path}; allowed: "
                         "the folder that the run began with")
    return description


def load_entries(
    entries: dict[str, Intervals], name: str, folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Fill the entries from the files of checkpoint `name` in `folder`. ValueError: they cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of a single process
            dcp.load(entries, storage_reader=dcp.FileSystemReader(folder),
                     planner=LoadPlanner(flatten_state_dict=False), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        where = "" if group is None else f"rank {rank}: "
        raise DamagedError(f"{name}: cannot be read: {where}{named_line(cause)}") from None


def needed_files(metadata: Metadata, entries: dict[str, Intervals]) -> set[str]:
    """Files of a checkpoint that hold any part of `entries`."""
    files = set()
    for name, entry in entries.items():
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        for chunk in stored.chunks:
            start, stop = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
            if any(start < mine + len(part) and mine < stop for mine, part in entry.parts.items()):
                files.add(metadata.storage_data[MetadataIndex(name, chunk.offsets)].relative_path)
    return files


class StoredValues:
    """The values in `folder`, the `tensors_folder` of a checkpoint on this machine. `name` is its name in errors;
    `shapes`: those of the model's trained parameters; `others`: the other ones that `gather` may be asked for, and
    `base`: the files that these come from. ValueError: the checkpoint is of another model or `base`, or damaged.
    """

    def __init__(
        self, name: str, folder: Path, shapes: Mapping[str, tuple[int, ...]], others: Mapping[str, Tensor],
        base: StoredWeights | None = None,
    ) -> None:
        self.name, self.folder, self.shapes, self.others = name, folder, dict(shapes), others
        try:
            content = (folder / DESCRIPTION).read_bytes()
        except OSError as error:
            raise ValueError(f"{name}/{DESCRIPTION}: cannot be read: {named_line(error)}") from None
        described(name, content, self.shapes, base)

    def gather(self, wanted: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Tensor | None]]:
        """As `Engine.gather`, for one rank; all that is wanted is read at once. ValueError: it cannot be read."""
        names = [name for name, _ in wanted]
        found = {name: torch.empty(self.shapes[name]) for name in names if name in self.shapes}
        load_entries({f"value.{name}": Intervals(value.numel(), {0: value.view(-1)}) for name, value in found.items()},
                     self.name, self.folder)
        for name in names:
            yield name, found.pop(name) if name in found else self.others[name].detach().float()


@dataclass
class Intervals:
    """This rank's intervals, by start, of one flattened tensor of `size` elements, for torch.distributed.checkpoint."""

    size_elements: int
    parts: dict[int, Tensor]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties, size = TensorProperties(dtype=torch.float32), torch.Size([self.size_elements])
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size))
                for chunk in self.__create_chunk_list__()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([start]), sizes=part.shape)
                for start, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[index.offset[0]]


class WrittenFiles(NamedTuple):
    """What a save has in common with later ones of the same intervals: the plan of this rank, where its file holds
    what, and on rank 0 the content of the index file (nothing on others).
    """

    plan: SavePlan
    results: list[WriteResult]
    metadata: bytes


class Writer(dcp.FileSystemWriter):
    """Reports why a file cannot be written: torch's own error, about a position in its archive, hides the system's."""

    results: list[WriteResult]

    def write_data(self, plan: SavePlan, planner: planners.SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner)
            self.results = written.wait()
            return written
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(f"{self.path}: cannot be written: {cause.strerror or cause}") from None

    def write_as(self, before: WrittenFiles, state: dict[str, Any], planner: SavePlanner) -> None:
        """Write this rank's files as those of an earlier save. Not a collective."""
        planner.set_up_planner(state)
        self.set_up_storage_writer(bool(before.metadata))
        self.prepare_local_plan(before.plan)
        self.write_data(before.plan, planner)
        if self.results != before.results:
            raise ValueError(f"{self.path}: its parts do not lie where those of the save before did")
        if before.metadata:
            with replacing(Path(self.path) / INDEX) as temporary:
                temporary.write_bytes(before.metadata)

    def files(self, planner: SavePlanner, is_first: bool) -> WrittenFiles:
        """What has been written; `is_first`: this is rank 0."""
        return WrittenFiles(planner.plan, self.results, (Path(self.path) / INDEX).read_bytes() if is_first else b"")


class SavePlanner(DefaultSavePlanner):
    """torch looks shards up in tensors only; ours are Intervals."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """As SavePlanner; torch's own set-up drops what is neither a tensor nor a plain value."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)
