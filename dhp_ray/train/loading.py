"""Gives a sharded module its values: each rank reads the rows that it owns from the files; the whole is nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dhp_ray.model.weights import RowsOfParameter, StoredWeights


def first_row(num_rows: int, rank: int, world_size: int) -> int:
    """The first of a parameter's rows that FSDP2 gives to `rank`; each rank has equally many but the last ones."""
    return min(-(-num_rows // world_size) * rank, num_rows)


def read_shards(
    root: nn.Module,
    parameters: Mapping[str, DTensor],
    weights: StoredWeights,
    rank: int,
    world_size: int,
    device: torch.device,
) -> None:
    """Allocate and fill this rank's rows of the sharded `parameters` of `root`, which are on the meta device. Not a
    collective.

    Raises:
        ModelError: a file is gone or damaged.
    """
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}  # tables that no file holds
    root.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in root.named_buffers():
            buffer.copy_(buffers[name])
    weights.read({name: RowsOfParameter(first_row(parameter.shape[0], rank, world_size),
                                        cast(DTensor, parameter.detach()).to_local())
                  for name, parameter in parameters.items()})
