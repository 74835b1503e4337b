"""A rank's intervals of flattened tensors, in the form in which torch.distributed.checkpoint saves and loads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import planner as planners
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


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


class Writer(dcp.FileSystemWriter):
    """Reports why a file cannot be written: torch's own error, about a position in its archive, hides the system's."""

    def write_data(self, plan: SavePlan, planner: planners.SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(f"{self.path}: cannot be written: {cause.strerror or cause}") from None


class SavePlanner(DefaultSavePlanner):
    """torch looks shards up in tensors only; ours are Intervals.

    All saves of a Checkpointer have one plan, which the ranks make together at the first: torch keeps it under `key`,
    until `forget_plan`.
    """

    def __init__(self, key: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=True)
        self._cached_plans_key = key

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def forget_plan(key: str) -> None:
    """Drop what torch keeps of the plan `key`. After a save that failed on some ranks, all ranks plan anew: one that
    did not get its part of the plan could not go on with what the others have.
    """
    for plans in (SavePlanner._cached_save_plan, SavePlanner._cached_all_plans, SavePlanner._cached_global_plan,
                  SavePlanner._cached_metadata, SavePlanner._cached_final_save_plan):
        plans.pop(key, None)  # type: ignore[attr-defined]


class LoadPlanner(DefaultLoadPlanner):
    """As SavePlanner; torch's own set-up drops what is neither a tensor nor a plain value."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)  # type: ignore[no-any-return]
