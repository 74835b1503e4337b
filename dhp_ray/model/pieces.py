"""What a rank knows of its pieces of a pack's sequences, for layers that carry a state from token to token.

Two things cross from one piece of a sequence to the next: the tokens that a short convolution looks back on, and the
state at the piece's end. Example: a sequence of 12 tokens in zigzag at degree 2, a convolution over 4 tokens, and
chunks of 2 (they are of CHUNK):

    tokens        0 1 2     3 4 5 6 7 8      9 10 11      a piece: neighbouring tokens of a sequence on one member
    member        0         1                0
    kind          first     middle           last         and whole, of a sequence that is not cut
    looks back    -         0 1 2            6 7 8        rows that the other member sends
    chunks        0 1, 2    3 4, 5 6, 7 8    9 10, 11     each of one piece; the last one is padded
    state         sent      received, sent   received     at the piece's last token, and before its first one

A member's pieces are sorted by kind, and in each kind those with more chunks come first. Neighbours among them form a
group, of which one product computes the n-th chunk of all pieces that have one. Its chunks are cut into runs, of at
most RUN_CHUNKS together. Example: pieces of 5, 4 and 1 chunks as a group, if a run has at most 6:

    first piece     0  1  | 2  3  4            a row of numbers: one after the other, from state to state
    second          0  1  | 2  3               a column: at the same time
    third           0     |                    a run: what is computed again together in the backward pass
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dhp_ray.model.layout import PackLayout
from dhp_ray.model.tensor_fields import TensorFields
from dhp_ray.planner.memory.model import RUN_CHUNKS, RUN_STEPS
from dhp_ray.planner.memory.model import STATE_CHUNK as CHUNK

Counts = tuple[int, ...]
"""How many of a group's pieces have an n-th chunk, for successive n."""
KINDS = ("whole", "first", "middle", "last")
"""Of pieces: what they are of their sequence."""


class Piece(NamedTuple):
    """Tokens start <= position < stop of a sequence of `length`; they are rows of `member` from `first_row` on."""

    sequence: int
    start: int
    stop: int
    length: int
    member: int
    first_row: int

    @property
    def receives_state(self) -> bool:
        return self.start > 0

    @property
    def sends_state(self) -> bool:
        return self.stop < self.length

    @property
    def kind(self) -> int:
        """Its place among KINDS."""
        return 2 * self.receives_state + (self.sends_state != self.receives_state)

    @property
    def num_chunks(self) -> int:
        return -(-(self.stop - self.start) // CHUNK)


class ChainPiece(NamedTuple):
    """One piece in the chain of a sequence: its member, and its places among the states that this member receives and
    among those that it sends; -1 where there is none.
    """

    member: int
    received: int
    sent: int


@dataclass(frozen=True)
class Pieces(TensorFields):
    """The pieces of one member of a pack, L tokens in C chunks, and what it exchanges with the others for them.

    Made on the CPU before a step; `map` brings the tensors to the device.
    """

    member: int
    runs: tuple[tuple[tuple[Counts, ...], ...], ...]
    """For each of KINDS: its groups, each as its runs."""
    chunk_rows: Tensor
    """(C, CHUNK) int64: the row of each token of the chunks, plus 1; 0 for padding."""
    token_places: Tensor
    """(L,) int64: the place of each row among the C x CHUNK tokens of the chunks."""
    conv_rows: Tensor
    """(L + looks back x pieces,) int64: for each piece the rows that it looks back on, then its own. Counted are a row
    of zeros, the member's own rows, and the received ones, one after the other.
    """
    conv_places: Tensor
    """(L,) int64: among `conv_rows`, the first of those that the convolution takes for a token."""
    send_rows: tuple[Tensor, ...]
    """For every member: the rows of this one that it looks back on, (rows,) int64."""
    receive_counts: tuple[int, ...]
    """For every member: how many rows come from it."""
    sent: tuple[int, ...]
    """For every member: how many states it sends, of its first pieces and then of its middle ones."""
    received: tuple[int, ...]
    """For every member: how many states it receives, for its middle pieces and then for its last ones."""
    chains: tuple[tuple[ChainPiece, ...], ...]
    """The pieces of each sequence that is cut, in its order."""

    @property
    def exchanges_rows(self) -> bool:
        return any(self.receive_counts) or any(map(len, self.send_rows))

    @property
    def exchanges_states(self) -> bool:
        return self.sent[self.member] + self.received[self.member] > 0


def pieces_of(layout: PackLayout, member: int, looks_back: int) -> Pieces:
    """A member's pieces. A convolution looks back on so many tokens. A member without tokens has one idle token of its
    own, as in all its layers.
    """
    if not layout.num_tokens(member):
        alone, none = pieces_of(PackLayout((1,), 1), 0, looks_back), (0,) * layout.degree
        return replace(alone, member=member, send_rows=(), receive_counts=(), sent=none, received=none)
    sequences = by_sequence(layout)
    of_member: list[list[Piece]] = [[] for _ in range(layout.degree)]
    for pieces in sequences:
        for piece in pieces:
            of_member[piece.member].append(piece)
    before = [[_rows_before(piece, sequences[piece.sequence], looks_back) for piece in pieces] for pieces in of_member]
    runs, chunk_rows = _chunks(of_member[member])
    token_places = torch.empty(layout.num_tokens(member), dtype=torch.int64)
    (filled,) = chunk_rows.flatten().nonzero(as_tuple=True)
    token_places[chunk_rows.flatten()[filled] - 1] = filled
    conv_rows, conv_places = _convolved_rows(of_member[member], before[member], len(token_places), looks_back)
    return Pieces(
        member=member, runs=runs, chunk_rows=chunk_rows, token_places=token_places, conv_rows=conv_rows,
        conv_places=conv_places,
        send_rows=tuple(torch.tensor([row for rows in wanted for owner, row in rows if owner == member],
                                     dtype=torch.int64) for wanted in before),
        receive_counts=tuple(sum(owner == other for rows in before[member] for owner, _ in rows)
                             for other in range(layout.degree)),
        sent=tuple(sum(piece.sends_state for piece in pieces) for pieces in of_member),
        received=tuple(sum(piece.receives_state for piece in pieces) for pieces in of_member),
        chains=_chains(sequences, of_member))


def by_sequence(layout: PackLayout) -> list[list[Piece]]:
    """The pieces of each sequence, in its order."""
    found: list[list[Piece]] = [[] for _ in layout.lengths]
    for member, shard in enumerate(layout.shards):
        first_row = 0
        for sequence, start, stop in shard:
            found[sequence].append(Piece(sequence, start, stop, layout.lengths[sequence], member, first_row))
            first_row += stop - start
    return [sorted(pieces, key=lambda piece: piece.start) for pieces in found]


def _in_order(pieces: list[Piece]) -> list[Piece]:
    """A member's pieces, kind by kind, each with those of more chunks first."""
    return sorted(pieces, key=lambda piece: (piece.kind, -piece.num_chunks))


def _chunks(pieces: list[Piece]) -> tuple[tuple[tuple[tuple[Counts, ...], ...], ...], Tensor]:
    """`Pieces.runs` and `Pieces.chunk_rows`."""
    runs: list[list[tuple[Counts, ...]]] = [[] for _ in KINDS]
    chunks: list[Tensor] = []
    left = _in_order(pieces)
    while left:
        size = RUN_CHUNKS // min(left[0].num_chunks, RUN_STEPS)
        group = [piece for piece in left[:size] if piece.kind == left[0].kind]
        left = left[len(group):]
        counts = [sum(piece.num_chunks > step for piece in group) for step in range(group[0].num_chunks)]
        runs[group[0].kind].append(_runs(counts))
        for step, count in enumerate(counts):
            for piece in group[:count]:
                first = piece.first_row + step * CHUNK
                last = min(first + CHUNK, piece.first_row + piece.stop - piece.start)
                chunks.append(torch.zeros(CHUNK, dtype=torch.int64))
                chunks[-1][:last - first] = torch.arange(first + 1, last + 1)
    return tuple(map(tuple, runs)), torch.stack(chunks)


def _runs(counts: list[int]) -> tuple[Counts, ...]:
    found: list[list[int]] = [[]]
    for count in counts:
        if sum(found[-1]) + count > RUN_CHUNKS:
            found.append([])
        found[-1].append(count)
    return tuple(map(tuple, found))


def _rows_before(piece: Piece, sequence: list[Piece], looks_back: int) -> list[tuple[int, int]]:
    """Member and row of the tokens before a piece of this sequence, at most so many."""
    if not piece.start:
        return []
    return [(other.member, other.first_row + position - other.start) for other in sequence
            for position in range(max(other.start, piece.start - looks_back), min(other.stop, piece.start))]


def _convolved_rows(
    pieces: list[Piece], before: list[list[tuple[int, int]]], num_tokens: int, looks_back: int
) -> tuple[Tensor, Tensor]:
    """`Pieces.conv_rows` and `Pieces.conv_places`. Received rows are sorted by member."""
    owners = sorted((owner, number) for number, (owner, _) in enumerate(row for rows in before for row in rows))
    place_of = {number: 1 + num_tokens + place for place, (_, number) in enumerate(owners)}
    rows: list[Tensor] = []
    places = torch.empty(num_tokens, dtype=torch.int64)
    count = end = 0
    for piece, wanted in zip(pieces, before):
        received = [place_of[count + number] for number in range(len(wanted))]
        count += len(wanted)
        size = piece.stop - piece.start
        rows += [torch.tensor([0] * (looks_back - len(wanted)) + received, dtype=torch.int64),
                 torch.arange(piece.first_row + 1, piece.first_row + 1 + size)]
        places[piece.first_row:piece.first_row + size] = torch.arange(end, end + size)
        end += looks_back + size
    return torch.cat(rows), places


def _chains(sequences: list[list[Piece]], of_member: list[list[Piece]]) -> tuple[tuple[ChainPiece, ...], ...]:
    sent, received = dict[Piece, int](), dict[Piece, int]()
    for pieces in of_member:
        ordered = _in_order(pieces)
        sent |= {piece: place for place, piece in enumerate(piece for piece in ordered if piece.sends_state)}
        received |= {piece: place for place, piece in enumerate(piece for piece in ordered if piece.receives_state)}
    return tuple(tuple(ChainPiece(piece.member, received.get(piece, -1), sent.get(piece, -1)) for piece in pieces)
                 for pieces in sequences if len(pieces) > 1)
