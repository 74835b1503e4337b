"""Which member of a pack holds which tokens: intervals of the sequences, and the blocks of attention between members.

Zigzag, for a sequence of 12 tokens at degree 3: 2 x 3 nearly equal chunks; member r holds chunks r and 5 - r, so that
under the causal mask every member computes the same number of scores:

    chunk    0     1     2     3     4     5
    tokens  0 1   2 3   4 5   6 7   8 9  10 11
    member   0     1     2     2     1     0

Everything except `zigzag` and `zigzag_of_all` works with any intervals that cover each token once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch


class TokenInterval(NamedTuple):
    """Tokens start <= position < stop of one sequence of the pack."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Attention of one member's queries to one member's keys: queries[i] (local offsets) attend to keys[i].

    A query is in at most one block; a key may be in several. `causal` blocks are square and have the same tokens on
    both sides; in the other blocks every query attends to every key.
    """

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    causal: bool


@dataclass(frozen=True)
class PackLayout:
    """How the tokens of a pack's sequences (`lengths`, packed one after the other) are spread over `degree` members.

    A member's local order is by sequence, then by position. `shards`, the intervals of each member in that order, cover
    each token once; by default they are zigzag. There is no padding, no interval crosses a sequence, and a member may
    have no tokens. A token attends to its sequence up to itself.
    """

    lengths: tuple[int, ...]
    degree: int
    shards: tuple[tuple[TokenInterval, ...], ...] = ()
    _num_tokens: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.degree < 1 or not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"pack layout: degree {self.degree}, lengths {self.lengths}; each must be at least 1")
        if not self.shards:
            object.__setattr__(self, "shards", zigzag(self.lengths, self.degree))
        object.__setattr__(self, "_num_tokens",
                           tuple(sum(piece.stop - piece.start for piece in shard) for shard in self.shards))

    def num_tokens(self, member: int) -> int:
        return self._num_tokens[member]

    def index(self, member: int) -> torch.Tensor:
        """Positions of the member's tokens in the packed sequence, in local order: (num_tokens(member),), long."""
        firsts = (0, *accumulate(self.lengths))
        pieces = [torch.arange(firsts[piece.sequence] + piece.start, firsts[piece.sequence] + piece.stop)
                  for piece in self.shards[member]]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)

    def blocks(self, query_member: int, key_member: int) -> Blocks:
        """The attention of `query_member`'s tokens to `key_member`'s, in as few blocks as the intervals allow.

        A member's own tokens of a sequence are one causal block, since they are sorted by position. Another member's
        tokens lie completely before or after each interval of queries, so the visible keys are a prefix.
        """
        keys_of = _spans(self.shards[key_member])
        queries: list[slice] = []
        keys: list[slice] = []
        if query_member == key_member:
            queries += [slice(pieces[0][1].start, pieces[-1][1].stop) for pieces in keys_of.values()]
            return Blocks(tuple(queries), tuple(queries), causal=True)
        for sequence, pieces in _spans(self.shards[query_member]).items():
            for interval, local in pieces:
                seen = [span for other, span in keys_of.get(sequence, ()) if other.stop <= interval.start]
                if not seen:
                    continue
                visible = slice(seen[0].start, seen[-1].stop)
                if keys and keys[-1] == visible:  # then of this sequence, and next to the queries before
                    queries[-1] = slice(queries[-1].start, local.stop)
                else:
                    queries.append(local)
                    keys.append(visible)
        return Blocks(tuple(queries), tuple(keys), causal=False)


def zigzag(lengths: Sequence[int], degree: int) -> tuple[tuple[TokenInterval, ...], ...]:
    """Intervals of each member, as in the drawing above. The members' numbers of tokens differ by one at most, even for
    short sequences.

    A chunk has length // (2 x degree) tokens; the remaining tokens go one by one to the members with the fewest so far.
    """
    shards: list[list[TokenInterval]] = [[] for _ in range(degree)]
    loads = [0] * degree
    for sequence, length in enumerate(lengths):
        share, num_left = divmod(length, 2 * degree)
        sizes = [share] * (2 * degree)
        neediest = sorted(range(degree), key=loads.__getitem__)
        for place, member in enumerate((neediest + neediest)[:num_left]):
            sizes[member if place < degree else 2 * degree - 1 - member] += 1
        bounds = (0, *accumulate(sizes))
        for member in range(degree):
            mirror = 2 * degree - 1 - member
            early, late = (bounds[member], bounds[member + 1]), (bounds[mirror], bounds[mirror + 1])
            pieces = [(early[0], late[1])] if early[1] == late[0] else [early, late]
            shards[member] += [TokenInterval(sequence, start, stop) for start, stop in pieces if stop > start]
            loads[member] += sizes[member] + sizes[mirror]
    return tuple(map(tuple, shards))


def zigzag_of_all(lengths: Sequence[int], degree: int) -> tuple[tuple[TokenInterval, ...], ...]:
    """Zigzag of the sequences as if they were one, cut where a sequence ends: 2 x degree - 1 cuts at most, however many
    sequences there are. Scores under the causal mask are as evenly spread as in `zigzag` if there is one sequence.
    Example, lengths 6, 3 and 3 at degree 3:

        chunk     0     1     2     3     4     5
        tokens   0 1   2 3   4 5   0 1   2 0   1 2
        sequence 0 0   0 0   0 0   1 1   1 2   2 2
        member    0     1     2     2     1     0
    """
    ends = tuple(accumulate(lengths))
    return tuple(tuple(
        TokenInterval(sequence, max(start, end - length) - (end - length), min(stop, end) - (end - length))
        for _, start, stop in shard for sequence, (length, end) in enumerate(zip(lengths, ends))
        if start < end and end - length < stop) for shard in zigzag((ends[-1],), degree))


def _spans(shard: Sequence[TokenInterval]) -> dict[int, list[tuple[TokenInterval, slice]]]:
    """A member's intervals by sequence, each with its place in local order."""
    spans: dict[int, list[tuple[TokenInterval, slice]]] = {}
    first = 0
    for interval in shard:
        last = first + interval.stop - interval.start
        spans.setdefault(interval.sequence, []).append((interval, slice(first, last)))
        first = last
    return spans
