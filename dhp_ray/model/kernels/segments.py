"""The argument of a variable-length attention call, made of a layout's blocks or of lengths, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from dhp_ray.model.layout import Blocks

RowIndex = slice | Tensor
"""Which rows of a local tensor: one slice where they are contiguous (a view, no copy), else a long index."""


@dataclass(frozen=True)
class Segments:
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

    def to(self, device: torch.device, non_blocking: bool = False) -> Segments:
        """The same segments on a device, as `Tensor.to`: themselves where they are there."""
        if self.query_offsets_tensor.device == device:
            return self
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, change: Callable[[Tensor], Tensor]) -> Segments:
        """The same segments with every tensor changed."""
        query_rows, key_rows = (rows if isinstance(rows, slice) else change(rows)
                                for rows in (self.query_rows, self.key_rows))
        return replace(self, query_rows=query_rows, key_rows=key_rows,
                       query_offsets_tensor=change(self.query_offsets_tensor),
                       key_offsets_tensor=change(self.key_offsets_tensor))

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
        total[rows] += part
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
