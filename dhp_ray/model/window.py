"""What a rank knows of a pack for attention within a sliding window: a token attends to `size` tokens, itself the last.

A rank receives the keys and values that its tokens look back on, in one message from each rank that has some, however
long the sequences are; then it computes by itself. All tokens cost the same, so any layout will do that is even.

Kernels know causal and whole blocks alone. So positions are cut at the multiples of the size. Example: size 4, tokens 5
to 7 of a sequence:

    keys      1 2 3   4   5 6 7
    query 5     b b   w   a
          6       b   w   a a
          7           w   a a a

    a  to themselves, causal
    w  to all that lies between a and b: nothing if a rank has a whole cell, 4 to 7
    b  to tokens of the cell before: causal if queries (6, 5) and keys (3, 2) are taken from the last to the first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dhp_ray.model.layout import Blocks, PackLayout
from dhp_ray.model.pieces import Piece, by_sequence
from dhp_ray.model.segment_attention import Segments
from dhp_ray.model.tensor_fields import TensorFields

Rows = tuple[Tensor, Tensor]
"""Of the queries and of the keys of a block."""


@dataclass(frozen=True)
class Window(TensorFields):
    """One member's part. Made on the CPU before a step; `map` brings the tensors to the device."""

    segments: tuple[Segments, ...]
    """The blocks a, w and b of the drawing; keys are counted in the member's own rows and, behind them, the received
    ones.
    """
    send_rows: tuple[Tensor, ...]
    """For every member: the rows of this one that it looks back on, (rows,) int64."""
    receive_counts: tuple[int, ...]
    """For every member: how many rows come from it."""

    @property
    def exchanges(self) -> bool:
        return any(self.receive_counts) or any(map(len, self.send_rows))


def window_of(layout: PackLayout, member: int, size: int) -> Window:
    """A member's part of attention within a window of `size` tokens."""
    sequences = by_sequence(layout)
    received = sorted((piece for pieces in sequences for piece in _looked_back_on(pieces, member, size)),
                      key=lambda piece: piece.member)
    sent = [[piece for pieces in sequences for piece in _looked_back_on(
        [piece for piece in pieces if piece.member in (member, other)], other, size)] for other in range(layout.degree)]
    end, received_of = layout.num_tokens(member), [list[tuple[int, int, int]]() for _ in sequences]
    for piece in received:
        received_of[piece.sequence].append((piece.start, piece.stop, end))
        end += piece.stop - piece.start
    a, w, b = list[slice](), list[Rows](), list[Rows]()
    for pieces, others in zip(sequences, received_of):
        own = [piece for piece in pieces if piece.member == member]
        held = sorted([(piece.start, piece.stop, piece.first_row) for piece in own] + others)
        for piece in own:
            cuts = [piece.start, *range(piece.start // size * size + size, piece.stop, size), piece.stop]
            for start, stop in pairwise(cuts):
                first = piece.first_row + start - piece.start
                queries = torch.arange(first, first + stop - start)
                a.append(slice(first, first + stop - start))
                if (between := max(0, stop - size)) < start:
                    w.append((queries, _rows(held, between, start)))
                if start >= size and stop - start > 1:
                    b.append((queries[:-1].flip(0), _rows(held, start - size + 1, stop - size).flip(0)))
    return Window(
        segments=(Segments.of(Blocks(tuple(a), tuple(a), causal=True)), _segments(w, False), _segments(b, True)),
        send_rows=tuple(torch.cat([torch.zeros(0, dtype=torch.int64), *(
            torch.arange(piece.first_row, piece.first_row + piece.stop - piece.start)
            for piece in pieces)]) for pieces in sent),
        receive_counts=tuple(sum(piece.stop - piece.start for piece in received if piece.member == other)
                             for other in range(layout.degree)))


def _looked_back_on(pieces: Sequence[Piece], member: int, size: int) -> list[Piece]:
    """The parts of a sequence's pieces on other members that tokens of `member` attend to."""
    found, following = [], None
    for piece in reversed(pieces):
        if piece.member == member:
            following = piece.start
        elif following is not None and (start := max(piece.start, following - size + 1)) < piece.stop:
            found.append(piece._replace(start=start, first_row=piece.first_row + start - piece.start))
    return found[::-1]


def _rows(held: Sequence[tuple[int, int, int]], start: int, stop: int) -> Tensor:
    """The rows of positions of a sequence, from (first position, last + 1, row of the first) of what a member has."""
    return torch.cat([torch.arange(row + max(first, start) - first, row + min(last, stop) - first)
                      for first, last, row in held if first < stop and start < last])


def _segments(blocks: Sequence[Rows], causal: bool) -> Segments:
    if not blocks:
        return Segments.of(Blocks((), (), causal))
    queries, keys = zip(*blocks)
    query_offsets, key_offsets = ((0, *accumulate(map(len, rows))) for rows in (queries, keys))
    return Segments(torch.cat(queries), torch.cat(keys), query_offsets, key_offsets,
                    torch.tensor(query_offsets, dtype=torch.int32), torch.tensor(key_offsets, dtype=torch.int32),
                    causal)
