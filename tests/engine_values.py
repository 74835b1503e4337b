"""What engines hold: their parameters and gradients, whole, and the bytes of a flat engine's state."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dhp_ray.train.engine import COMPUTE_TYPES, Engine
from dhp_ray.train.sharded_engine import ShardedEngine


def full_parameters(engine: Engine) -> dict[str, Tensor]:
    """All parameters as fp32 CPU tensors by name, on rank 0; empty on the others. Every rank calls this. Names of tied
    parameters appear once.
    """
    return {name: value for name, value in engine.gather((name, 0) for name in [*engine.parameters, *engine.frozen])
            if value is not None}


def full_gradients(engine: ShardedEngine) -> dict[str, Tensor]:
    """The gradients summed over all ranks, whole, by name; zero for what no pack used. Every rank calls this."""
    return {name: torch.zeros(engine.shapes[name], device=engine.device) if parameter.grad is None
            else cast(DTensor, parameter.grad).full_tensor().view(engine.shapes[name])
            for name, parameter in engine.parameters.items()}


def resident_bytes(num_parameters: int, world_size: int, precision: str, num_frozen: int = 0) -> int:
    """Return the bytes of device memory that a rank holds between steps with a flat engine: parameters, fp32 gradients,
    two versions of its shard.

    `num_parameters` counts all parameters, `num_frozen` those of them that are not trained. Padding is left out
    (64 elements a parameter at most).
    """
    compute = COMPUTE_TYPES[precision].itemsize
    trained = num_parameters - num_frozen
    versions = 2 * 3 * 4  # value and both moments, fp32
    reduced = 4 if world_size > 1 else 0
    return num_parameters * compute + trained * 4 + math.ceil(trained / world_size) * (versions + reduced)
