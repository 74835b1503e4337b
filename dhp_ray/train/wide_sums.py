"""Adds gradients in the computing type to sums in fp32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor


def wide_add(device: torch.device) -> Callable[[Tensor, Tensor], object]:
    """Return what adds a tensor of any floating type to one in fp32 of the same shape, contiguous, in place. The sums
    have the same bits on every kind of device.
    """
    if device.type == "cuda":
        with suppress(ModuleNotFoundError):  # of triton, which not every build of torch brings along
            from dhp_ray.comm import cuda_adds

            return cuda_adds.add
    return torch.Tensor.add_
