"""How the units of a model are laid out in the memory of a node: each unit's parameters one after the other, cut into
slices.

    unit "layers.3"      | q_proj ....... | k_proj .. | norm | (frozen) bias |
    values               [ member 0      ][ member 1      ][ member 2         ]   computing type, all parameters
    gradient sums        [ member 0  ][ member 1  ][ member 2   ]                 fp32, only trained parameters

    part of member 1     [ values of unit 0 | values of unit 1 | ... | sums of unit 0 | sums of unit 1 | ... ]

A unit is a set of parameters that are read together. AdamW's shards have another layout (`buckets.py`): `pieces` says
which elements of the flat buffer a member has in its slices.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dhp_ray.train.state.buckets import PARAMETER_ALIGNMENT, FlatLayout

SLICE_BYTES = 64
"""A slice begins at a multiple of this many bytes of its part, and its length is a multiple too."""


@dataclass(frozen=True)
class Unit:
    """Names of parameters, trained ones before frozen ones, and where each begins in the unit (elements).

    `row`: slices are cut between rows of this many elements (1: anywhere that alignment allows).
    """

    starts: Mapping[str, int]
    trained_size: int
    size: int
    row: int = 1

    @staticmethod
    def of(shapes: Mapping[str, Sequence[int]], frozen: Collection[str] = (), row: int = 1) -> Unit:
        """`shapes` of its parameters; `frozen` are those of them that are not trained."""
        starts: dict[str, int] = {}
        end = trained_size = 0
        for parameter in sorted(shapes, key=lambda parameter: parameter in frozen):
            starts[parameter] = end
            end += math.prod(shapes[parameter])
            end = end if row > 1 else -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
            if parameter not in frozen:
                trained_size = end
        return Unit(starts, trained_size, end, row)


class Held(NamedTuple):
    """Elements `start` to `stop` of the flat buffer lie in `member`'s part, from element `offset` of its region on."""

    start: int
    stop: int
    member: int
    offset: int


class Slices:
    """One kind of value (values or sums) of all units, over the members of a node.

    `starts[u]`: where unit u's slice begins in each member's region, in elements; `lengths[u]`: how long it is.
    """

    def __init__(self, units: Sequence[Unit], num_members: int, element_bytes: int, trained_only: bool) -> None:
        self.num_members = num_members
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.sizes = [unit.trained_size if trained_only else unit.size for unit in units]
        end = 0
        for unit, size in zip(units, self.sizes):
            step = math.lcm(unit.row, SLICE_BYTES // element_bytes)
            length = -(-math.ceil(size / num_members) // step) * step
            self.starts.append(end)
            self.lengths.append(length)
            end += length
        self.region = end

    def of_member(self, unit: int, member: int) -> tuple[int, int]:
        """Return the elements of a unit that a member has: from, to."""
        length, size = self.lengths[unit], self.sizes[unit]
        return min(member * length, size), min((member + 1) * length, size)

    def pieces(self, units: Sequence[Unit], layout: FlatLayout) -> list[Held]:
        """Return which member has which elements of the flat buffer, in the order of the buffer. Padding belongs to no
        member.
        """
        found = []
        for number, unit in enumerate(units):
            for name, begin in unit.starts.items():
                if name not in layout.starts:
                    continue
                flat = layout.interval(name)
                end = begin + flat.stop - flat.start
                for member in range(begin // self.lengths[number], self.num_members):
                    first, last = self.of_member(number, member)
                    start, stop = max(begin, first), min(end, last)
                    if first >= end:
                        break
                    if start < stop:
                        found.append(Held(flat.start + start - begin, flat.start + stop - begin, member,
                                          self.starts[number] + start - first))
        return sorted(found)


class HeldMap:
    """Finds which members have a range of the flat buffer."""

    def __init__(self, pieces: Sequence[Held]) -> None:
        self._pieces, self._stops = pieces, [piece.stop for piece in pieces]

    def within(self, start: int, stop: int) -> list[Held]:
        found = []
        for place in range(bisect_right(self._stops, start), len(self._pieces)):
            piece = self._pieces[place]
            if piece.start >= stop:
                break
            begin, end = max(start, piece.start), min(stop, piece.stop)
            found.append(Held(begin, end, piece.member, piece.offset + begin - piece.start))
        return found
