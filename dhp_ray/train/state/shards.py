"""What a rank owns of parameters and optimizer state: where its pieces lie, and their values in versions.

    flat buffer   | weight ............... | bias ..  | weight ................ (padding)|
    buckets       |        0         |         1         |        2        |     3      |
    rank's slice  | r0 | r1 | r2     | r0 | r1 | r2      | ...             | r0 | r1 |r2|
    shard of r1        [ slice of 0 ][ slice of 1 ][ slice of 2 ][ slice of 3 ]

A bucket is one collective. Its slices are equally long, so that every backend can reduce-scatter and gather it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

PARAMETER_ALIGNMENT = 64
"""Elements; a parameter begins at a multiple of this, as matrix kernels prefer (128 bytes in bf16)."""

SLICE_ALIGNMENT = 8
"""Elements; the length of a rank's slice of a bucket is a multiple of this, as fast collectives prefer (16 bytes in
bf16).
"""

UNFINISHED = -1
"""Version of a state that is being written."""

PART_ELEMENTS = 2**26
"""Numbers that are copied at once: 256 MB."""

CPU = torch.device("cpu")


class Piece(NamedTuple):  # a tuple: ranks send each other all of theirs
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
    """The layout of parameters, with these shapes in the order of the buffer, over a flat buffer and `world_size`
    ranks. `bucket_elements`: wanted length of a bucket; rounded up so that a rank's slice is a multiple of
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


@dataclass
class ShardState:
    """One version of a rank's shard, fp32 (shard_size,) each. `version` counts the updates since the start of training,
    `vision_updates` those of them that the vision encoder took part in: the step counters of Adam.
    """

    value: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    version: int = 0
    vision_updates: int = 0

    @classmethod
    def zeros(cls, size: int, device: torch.device, pinned: bool = False) -> ShardState:
        """`pinned`: in host memory that a device copies to and from while it computes."""
        values = torch.zeros(3, size, dtype=torch.float32, device=device, pin_memory=pinned)
        value, exp_avg, exp_avg_sq = values.unbind()
        return cls(value, exp_avg, exp_avg_sq)

    @classmethod
    def empty(cls, size: int) -> ShardState:
        """Host memory for a state, whose pages are not touched yet."""
        value, exp_avg, exp_avg_sq = torch.empty(3, size, dtype=torch.float32).unbind()
        return cls(value, exp_avg, exp_avg_sq, UNFINISHED)

    def copy_(self, other: ShardState, before_part: Callable[[], None] = lambda: None) -> None:
        """Take over another state, PART_ELEMENTS numbers at a time; it is unfinished until that is done."""
        self.version = UNFINISHED
        for mine, theirs in zip(self.tensors().values(), other.tensors().values(), strict=True):
            for part, source in zip(mine.split(PART_ELEMENTS), theirs.split(PART_ELEMENTS)):
                before_part()
                part.copy_(source)
        self.version, self.vision_updates = other.version, other.vision_updates

    def tensors(self) -> dict[str, Tensor]:
        return {"value": self.value, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


@dataclass(frozen=True)
class LocalShard:
    """A complete version of rank `owner`'s shard; `pieces` say what it holds, in the layout that it comes from."""

    owner: int
    version: int
    pieces: tuple[Piece, ...]
    state: ShardState

    def on_host(self, before_part: Callable[[], None] = lambda: None) -> LocalShard:
        """Return the same shard in host memory; itself if it is there already."""
        if self.state.value.device == CPU:
            return self
        state = ShardState.zeros(self.state.value.numel(), CPU)
        state.copy_(self.state, before_part)
        return LocalShard(self.owner, self.version, self.pieces, state)
