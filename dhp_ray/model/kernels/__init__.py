"""Attention kernels: variable-length attention over packed segments, with the log-sum-exp and an explicit backward.

Ring attention needs both: steps are merged by their log-sum-exp, and the backward of one step runs with the output and
the log-sum-exp of all of them.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from dhp_ray.model.kernels.segments import Segments

__all__ = ["Kernel", "Segments", "kernel_for"]


class Kernel(Protocol):
    """q: (Lq, H, D), k and v: (Lk, Hk, D) with H a multiple of Hk (GQA), all of `segments`' rows one after the other.

    D is the head's width; Lq and Lk are at least 1. Scores are multiplied by `scale` before the softmax.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """Output (Lq, H, D) and log-sum-exp of the scores (H, Lq), fp32 or wider."""

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, given that of the output; `out` and `lse` are over every key that the queries see.
        """


def kernel_for(device: torch.device) -> Kernel:
    """The kernel of a device; ValueError when there is none."""
    if device.type not in ("cpu", "cuda", "npu"):
        raise ValueError(f"attention: no kernel for device {device.type!r}; there are cpu, cuda and npu")
    return cast(Kernel, importlib.import_module(f"dhp_ray.model.kernels.{device.type}"))
