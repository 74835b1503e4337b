"""The collectives inside FSDP, with the time that a rank is blocked in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.progress import Progress


class TimedCollective:
    """One kind of collective as FSDP calls it (its `AllGather` and `ReduceScatter`).

    `blocked_s` counts only on the CPU, where a call returns when it is done. On a device FSDP overlaps it with compute;
    there LayerMarks show what a rank waits for.
    """

    def __init__(self, call: Callable[..., dist.Work | None], progress: Progress) -> None:
        self._call, self._progress = call, progress
        self.blocked_s = 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> dist.Work | None:
        if output_tensor.device.type != "cpu":
            self._progress.check()
            return self._call(output_tensor, input_tensor, **options)
        begin = perf_counter()
        with self._progress.waiting("rows of other ranks"):
            work = self._call(output_tensor, input_tensor, **options)
        self.blocked_s += perf_counter() - begin
        return work
