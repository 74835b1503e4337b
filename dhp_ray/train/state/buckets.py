"""Where each parameter lies in the flat buffer, how the buffer is cut into buckets, and which part each rank owns.

    flat buffer   | weight ............... | bias ..  | weight ................ (padding)|
    buckets       |        0         |         1         |        2        |     3      |
    rank's slice  | r0 | r1 | r2     | r0 | r1 | r2      | ...             | r0 | r1 |r2|
    shard of r1        [ slice of 0 ][ slice of 1 ][ slice of 2 ][ slice of 3 ]

A bucket is one collective. Its slices are equally long, so that every backend can reduce-scatter and gather it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

PARAMETER_ALIGNMENT = 64
"""Elements; a parameter begins at a multiple of this, as matrix kernels prefer (128 bytes in bf16)."""

SLICE_ALIGNMENT = 8
"""Elements; the length of a rank's slice of a bucket is a multiple of this, as fast collectives prefer (16 bytes in
bf16).
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of the flattened parameter `name`; they begin at `offset` in the owner's shard."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def shard(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `start` to `stop` of the flat buffer; `shard` is where a rank's slice of them lies in its shard."""

    start: int
    stop: int
    shard: slice

    @property
    def flat(self) -> slice:
        return slice(self.start, self.stop)


class FlatLayout:
    """The layout of named parameters over a flat buffer and `world_size` ranks.

    Args:
        shapes: shape of each parameter, in the order of the buffer.
        bucket_elements: wanted length of a bucket; rounded up so that every rank's slice is a multiple of
            SLICE_ALIGNMENT.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], world_size: int, bucket_elements: int) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.world_size = world_size
        self.starts: dict[str, int] = {}
        end = 0
        for name, shape in self.shapes.items():
            self.starts[name] = end
            end += _round_up(math.prod(shape), PARAMETER_ALIGNMENT)
        unit = world_size * SLICE_ALIGNMENT
        self.size = _round_up(end, unit)
        length = _round_up(max(1, bucket_elements), unit)
        edges = [*range(0, self.size, length), self.size]
        self.buckets = tuple(
            Bucket(start, stop, slice(start // world_size, stop // world_size)) for start, stop in pairwise(edges))

    @property
    def shard_size(self) -> int:
        """Elements that each rank owns, padding included."""
        return self.size // self.world_size

    def interval(self, name: str) -> slice:
        """Return where a parameter is in the flat buffer."""
        start = self.starts[name]
        return slice(start, start + math.prod(self.shapes[name]))

    def buckets_of(self, name: str) -> range:
        """Numbers of the buckets that hold a part of a parameter."""
        interval, length = self.interval(name), self.buckets[0].stop
        return range(interval.start // length, -(-interval.stop // length))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces that `rank` owns, in the order of its shard. Padding belongs to no piece."""
        names = list(self.starts)
        starts = list(self.starts.values())
        found = []
        for bucket in self.buckets:
            width = (bucket.stop - bucket.start) // self.world_size
            begin = bucket.start + rank * width
            for place in range(max(0, bisect_right(starts, begin) - 1), len(names)):
                if starts[place] >= begin + width:
                    break
                interval = self.interval(names[place])
                start, stop = max(begin, interval.start), min(begin + width, interval.stop)
                if start < stop:
                    found.append(Piece(names[place], start - interval.start, stop - interval.start,
                                       bucket.shard.start + start - begin))
        return tuple(found)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
