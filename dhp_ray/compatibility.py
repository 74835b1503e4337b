"""What differs between torch 2.11 and 2.13, and between transformers 5.17 and 5.23: no other module looks which of them
it runs with.

pyproject.toml asks for the newest torch, whose numerics are tested. Images for GPUs and NPUs often have an older one,
and neither Ray nor OmegaConf nor PyAV: `planner`, `comm`, `model` and `train` run there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

Collective = Callable[..., dist.Work | None]


def _collective(name: str, older_name: str) -> Collective:
    found: Collective = getattr(dist, name if hasattr(dist, name) else older_name)
    return found


# torch 2.11 has the older names alone, 2.13 warns of them
all_gather_single = _collective("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _collective("reduce_scatter_single", "reduce_scatter_tensor")


def fsdp_param_groups(module: nn.Module) -> list[Any]:
    """The groups of parameters that `fully_shard` gathers at a time for a module itself: FSDPParamGroup of torch."""
    state: Any = cast(FSDPModule, module)._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11 has one at most


def checkpoint_activations(module: nn.Module) -> None:
    """Let a model of transformers compute what is inside its layers again in the backward pass, by autograd's hooks."""
    model: Any = module
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:  # its name in transformers 5.17; 5.23 warns of it
        model.gradient_checkpointing_enable({"use_reentrant": False})
