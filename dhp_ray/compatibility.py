"""The differences between torch 2.11 and 2.13, and between transformers 5.17 and 5.23: no other module checks which of
them it runs with.

pyproject.toml asks for the newest torch, whose numerics are tested. Container images for GPUs and NPUs often have an
older one, and neither Ray nor OmegaConf nor PyAV: `planner`, `comm`, `model` and `train` run there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

Collective = Callable[..., dist.Work | None]


def _collective(name: str, older_name: str) -> Collective:
    found: Collective = getattr(dist, name if hasattr(dist, name) else older_name)
    return found


# torch 2.11 has only the older names, 2.13 warns about them
all_gather_single = _collective("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _collective("reduce_scatter_single", "reduce_scatter_tensor")


HAS_FLASH_ATTENTION_3 = torch.__version__ >= "2.13"  # a TorchVersion
"""Earlier versions of torch register it for fp8 and the forward pass alone, or not at all."""
HAS_TRITON_3_7_1 = torch.__version__ >= "2.13"
"""Of torch for CUDA: each version asks for one of Triton."""


def fsdp_param_groups(module: nn.Module) -> list[Any]:
    """Return the parameter groups (torch's FSDPParamGroup) that `fully_shard` gathers at a time for the module itself.
    """
    state: Any = cast(FSDPModule, module)._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11 has one at most


def checkpoint_activations(module: nn.Module, context_fn: Callable[[], tuple[Any, Any]]) -> None:
    """Let a transformers model recompute what is inside its layers in the backward pass, by autograd's hooks. A layer
    does so while its `gradient_checkpointing` is True. `context_fn`: as for torch's `checkpoint`.
    """
    model: Any = module
    arguments = {"use_reentrant": False, "context_fn": context_fn}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(arguments)
    else:  # its name in transformers 5.17; 5.23 warns of it
        model.gradient_checkpointing_enable(arguments)
    # transformers also makes every embedding require a gradient, which only the reentrant kind needs. With a frozen
    # encoder its features would then want a backward pass on the ranks that have images, and on no other: the exchange
    # would hang.
    model.disable_input_require_grads()
