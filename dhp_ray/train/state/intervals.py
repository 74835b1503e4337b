"""A rank's intervals of flattened tensors, in the form in which torch.distributed.checkpoint saves and loads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import planner as planners
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dhp_ray.storage import replacing

INDEX = ".metadata"
"""torch's file of where each interval lies."""


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
        """Write this rank's files as those of an earlier save. Not a collective: no rank plans for all, or reads what
        all have written.
        """
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
        return self.state_dict[index.fqn].__get_tensor_shard__(index)  # type: ignore[no-any-return]
