"""The argument of a variable-length attention call, made of a layout's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

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
    there are segments; `*_offsets_tensor` are the same on the device (int32), made once per pack, not once per call.
    """

    query_rows: RowIndex
    key_rows: RowIndex
    query_offsets: tuple[int, ...]
    key_offsets: tuple[int, ...]
    query_offsets_tensor: Tensor
    key_offsets_tensor: Tensor
    causal: bool

    @staticmethod
    def of(blocks: Blocks, device: torch.device) -> Segments:
        query_offsets, key_offsets = _offsets(blocks.queries), _offsets(blocks.keys)
        return Segments(
            _rows(blocks.queries, device), _rows(blocks.keys, device), query_offsets, key_offsets,
            torch.tensor(query_offsets, dtype=torch.int32, device=device),
            torch.tensor(key_offsets, dtype=torch.int32, device=device),
            blocks.causal)

    def __len__(self) -> int:
        return len(self.query_offsets) - 1

    @cached_property
    def longest_query(self) -> int:
        return max(stop - start for start, stop in pairwise(self.query_offsets))

    @cached_property
    def longest_key(self) -> int:
        return max(stop - start for start, stop in pairwise(self.key_offsets))

    def pairs(self) -> Iterator[tuple[slice, slice]]:
        """Each segment's queries and keys among the gathered rows."""
        for query, key in zip(pairwise(self.query_offsets), pairwise(self.key_offsets)):
            yield slice(*query), slice(*key)


def add_rows(total: Tensor, rows: RowIndex, part: Tensor) -> None:
    """total[rows] += part, also where `rows` names a row twice."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def _offsets(slices: Sequence[slice]) -> tuple[int, ...]:
    return (0, *accumulate(piece.stop - piece.start for piece in slices))


def _rows(slices: Sequence[slice], device: torch.device) -> RowIndex:
    if not slices:
        return slice(0, 0)
    if all(before.stop == after.start for before, after in pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop)
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in slices]).to(device)
