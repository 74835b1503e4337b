"""Variable-length attention over segments of packed rows that one device holds.

`kernels/` has one file for each kind of device: attention with the log-sum-exp and an explicit backward. Ring attention
needs both: steps are merged by their log-sum-exp, and the backward of one step runs with the output and the log-sum-exp
of all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dhp_ray.model.layout import Blocks
from dhp_ray.model.recomputation import attention_once
from dhp_ray.model.tensor_fields import TensorFields

RowIndex = slice | Tensor
"""Which rows of a local tensor: one slice where they are contiguous (a view, no copy), else a long index."""


@dataclass(frozen=True)
class Segments(TensorFields):
    """Segment i attends query_offsets[i]:query_offsets[i + 1] to key_offsets[i]:key_offsets[i + 1] of the gathered
    rows.

    `query_rows` and `key_rows` gather the local tensors for the call. Offsets start with 0 and have one entry more than
    there are segments; `*_offsets_tensor` are the same as int32. They are made on the CPU, before a step; `to` brings
    them to the device, once per pack, not once per call.
    """

    query_rows: RowIndex
    key_rows: RowIndex
    query_offsets: tuple[int, ...]
    key_offsets: tuple[int, ...]
    query_offsets_tensor: Tensor
    key_offsets_tensor: Tensor
    causal: bool

    @staticmethod
    def of(blocks: Blocks) -> Segments:
        """One segment a block."""
        query_offsets, key_offsets = _offsets(blocks.queries), _offsets(blocks.keys)
        return Segments(_rows(blocks.queries), _rows(blocks.keys), query_offsets, key_offsets,
                        torch.tensor(query_offsets, dtype=torch.int32), torch.tensor(key_offsets, dtype=torch.int32),
                        blocks.causal)

    @staticmethod
    def between(offsets: Sequence[int]) -> Segments:
        """Without a mask: rows offsets[i]:offsets[i + 1] attend to themselves, each to all of them."""
        rows, tensor = slice(0, offsets[-1]), torch.tensor(offsets, dtype=torch.int32)
        return Segments(rows, rows, tuple(offsets), tuple(offsets), tensor, tensor, causal=False)

    def to(self, device: torch.device) -> Segments:
        """The same segments on a device, as `Tensor.to`: themselves where they are there."""
        if self.query_offsets_tensor.device == device:
            return self
        return self.map(lambda tensor: tensor.to(device))

    def __len__(self) -> int:
        return len(self.query_offsets) - 1

    @cached_property
    def longest_query(self) -> int:
        return max(stop - start for start, stop in pairwise(self.query_offsets))

    @cached_property
    def longest_key(self) -> int:
        return max(stop - start for start, stop in pairwise(self.key_offsets))

    @cached_property
    def runs(self) -> list[tuple[int, slice, slice]]:
        """Runs of neighbouring segments that have equally many queries and equally many keys: how many segments, and
        their queries and keys among the gathered rows.
        """
        lengths = zip(*([stop - start for start, stop in pairwise(offsets)]
                        for offsets in (self.query_offsets, self.key_offsets)))
        numbers = [len(list(run)) for _, run in groupby(lengths)]
        return [(stop - start, slice(self.query_offsets[start], self.query_offsets[stop]),
                 slice(self.key_offsets[start], self.key_offsets[stop]))
                for start, stop in pairwise((0, *accumulate(numbers)))]


def add_rows(total: Tensor, rows: RowIndex, part: Tensor) -> None:
    """total[rows] += part, also where `rows` names a row twice."""
    if isinstance(rows, slice):
        total[rows].add_(part)
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def _offsets(slices: Sequence[slice]) -> tuple[int, ...]:
    return (0, *accumulate(piece.stop - piece.start for piece in slices))


def _rows(slices: Sequence[slice]) -> RowIndex:
    if not slices:
        return slice(0, 0)
    if all(before.stop == after.start for before, after in pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop)
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in slices])


def concatenate(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts one after the other, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class Kernel(Protocol):
    """What a kind of device computes attention and experts with.

    q: (Lq, H, D), k and v: (Lk, Hk, D) with H a multiple of Hk (GQA), all of `segments`' rows one after the other.

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
        """Gradients of q, k and v from that of the output; `out` and `lse` are over every key that the queries see."""

    def grouped_products(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """(R, N): the rows of `x` (R, M) times one of `weight` (E, M, N) each. Group e ends before row `ends[e]`, int32
        on the device, and may have no rows. Rows behind the last group are left as they are in memory.
        """

    def grouped_sums(self, x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
        """(E, M, N): `x` (R, M) transposed times `y` (R, N), over the rows of each group."""


def kernel_for(device: torch.device) -> Kernel:
    """The kernel of a device; ValueError when there is none."""
    if device.type not in ("cpu", "cuda", "npu"):
        raise ValueError(f"attention: no kernel for device {device.type!r}; there are cpu, cuda and npu")
    return cast(Kernel, importlib.import_module(f"dhp_ray.model.kernels.{device.type}"))


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, kept: bool = False
) -> Tensor:
    """Each segment's queries attend to its keys: (L, H, D) for q (L, H, D), k and v (Lk, Hk, D), H a multiple of Hk.

    `segments` cover all L and Lk rows, one after the other, on the device of q. scale: what products of queries and
    keys are multiplied with. kept: a layer that is recomputed may keep the results (`recomputation.py`). ValueError:
    the segments are of other rows than q and k have.
    """
    if (segments.query_offsets[-1], segments.key_offsets[-1]) != (len(q), len(k)):
        raise ValueError(f"segment attention: {len(q)} queries and {len(k)} keys; the segments have "
                         f"{segments.query_offsets[-1]} and {segments.key_offsets[-1]}")
    return _SegmentAttention.apply(q, k, v, segments, scale, kept)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, kept: bool
    ) -> Tensor:
        compute = partial(kernel_for(q.device).forward, q, k, v, segments, scale)
        out, lse = attention_once(compute) if kept else compute()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        parts = kernel_for(q.device).backward(gradient, q, k, v, out, lse, ctx.segments, ctx.scale)
        return *(part.to(q.dtype) for part in parts), None, None, None
