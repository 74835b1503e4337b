"""Adds to fp32 sums, of values that are widened as they are read.

The adds of `add_shared` and `add_rows` are atomic: other processes may add to the same sums. Their memory may be that
of another GPU, so the scope is the system. `add` does what torch's `add_` does, whose kernel for two types is slow.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def add(sums: Tensor, values: Tensor) -> None:
    """Add `values` of any floating type to `sums`, fp32, contiguous and of the same shape."""
    _begin(sums, values, shared=False)


def add_shared(sums: Tensor, values: Tensor) -> None:
    """The same for sums that other processes add to."""
    _begin(sums, values, shared=True)


def _begin(sums: Tensor, values: Tensor, shared: bool) -> None:
    count = sums.numel()
    if count:
        _add[(triton.cdiv(count, BLOCK),)](sums, values.contiguous(), count, block=BLOCK, shared=shared)


def add_rows(sums: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add `values` (K, row) to rows `rows` (K,) of `sums` (N, row), fp32 and contiguous, which other processes add to.
    Rows outside of it are skipped.
    """
    count, width = values.shape
    if count:
        _add_rows[(count, triton.cdiv(width, BLOCK))](sums, rows, values.contiguous(), len(sums), width, block=BLOCK)


@triton.jit
def _add(sums, values, count, block: tl.constexpr, shared: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    value = tl.load(values + place, mask=inside).to(tl.float32)
    if shared:
        tl.atomic_add(sums + place, value, mask=inside, sem="relaxed", scope="sys")
    else:
        tl.store(sums + place, tl.load(sums + place, mask=inside) + value, mask=inside)


@triton.jit
def _add_rows(sums, rows, values, num_rows, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(rows + number).to(tl.int64)
    inside = (column < width) & (row >= 0) & (row < num_rows)
    value = tl.load(values + number * width + column, mask=inside).to(tl.float32)
    tl.atomic_add(sums + row * width + column, value, mask=inside, sem="relaxed", scope="sys")
