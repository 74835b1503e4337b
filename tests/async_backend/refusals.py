"""What HCCL on a 910B, or NCCL, refuses and gloo takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SUMMED = {torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16}
"""Types that HCCL reduces on Atlas A2 (HcclAllReduce, HcclReduce, HcclReduceScatter in the CANN reference; torch_npu
ProcessGroupHCCL.cpp, checkSupportedDataTypeOfAllReduce).
"""

MOVED = SUMMED | {torch.uint8, torch.bool, torch.float64}
"""Types that it sends, gathers and broadcasts."""


def refuse_types(tensors: Sequence[Tensor], reduced: bool) -> None:
    """Raise RuntimeError, in the words of torch_npu, for a type that is not supported."""
    for tensor in tensors:
        if tensor.dtype not in MOVED:
            raise RuntimeError(f"Unsupported data type for HCCL process group: {tensor.dtype}")
        if reduced and tensor.dtype not in SUMMED:
            raise RuntimeError(f"HCCL AllReduce & Reduce: Unsupported data type {tensor.dtype}")


def refuse_layouts(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError for a tensor that is not contiguous (ProcessGroupNCCL.cpp, check_gpu_single_tensor; it only
    warns of one that is sent, and sends its memory as it lies).
    """
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
