"""Atomic adds to fp32 sums, of values that are widened as they are read: other processes may add to the same sums.

Their memory may be that of another GPU, so the adds are of the system's scope.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def add(sums: Tensor, values: Tensor) -> None:
    """Add `values` (n,) of any floating type to `sums` (n,), fp32 and contiguous."""
    count = sums.numel()
    if count:
        _add[(triton.cdiv(count, BLOCK),)](sums, values.contiguous(), count, block=BLOCK)


def add_rows(sums: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add `values` (K, row) to rows `rows` (K,) of `sums` (N, row), fp32 and contiguous. Rows outside of it are
    skipped.
    """
    count, width = values.shape
    if count:
        _add_rows[(count, triton.cdiv(width, BLOCK))](sums, rows, values.contiguous(), len(sums), width, block=BLOCK)


@triton.jit
def _add(sums, values, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    value = tl.load(values + place, mask=inside).to(tl.float32)
    tl.atomic_add(sums + place, value, mask=inside, sem="relaxed", scope="sys")


@triton.jit
def _add_rows(sums, rows, values, num_rows, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(rows + number).to(tl.int64)
    inside = (column < width) & (row >= 0) & (row < num_rows)
    value = tl.load(values + number * width + column, mask=inside).to(tl.float32)
    tl.atomic_add(sums + row * width + column, value, mask=inside, sem="relaxed", scope="sys")
