"""The exchange at the end of a step between a node's slices and the shards of all ranks, bucket by bucket.

    sums      of every node's slices --> added up in my shard's slice of the bucket
    values    my shard's slice of the bucket --> one member's slice on every node

Each side knows from the layouts alone which elements it sends to each rank and gets from each rank: no size is
exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.train.state.buckets import Bucket, FlatLayout
from dhp_ray.train.state.slices import Held, HeldMap, Slices, Unit


@dataclass(frozen=True)
class Route:
    """One side of an exchange: how many elements go to (or come from) each rank, and where they lie, in that order."""

    counts: list[int]
    places: list[slice]

    @staticmethod
    def of(found: Sequence[Sequence[Held]], place_of: Callable[[Held], slice]) -> Route:
        """`found`: the pieces of each rank."""
        return Route([sum(piece.stop - piece.start for piece in pieces) for pieces in found],
                     [place_of(piece) for pieces in found for piece in pieces])


@dataclass
class Arriving:
    """An exchange under way: what arrives from all ranks is added to places of `target`, or copied there."""

    work: dist.Work | None
    received: Tensor
    sent: Tensor
    """Kept until it has been sent."""
    places: list[slice]
    target: Tensor
    adds: bool

    def take(self) -> None:
        """Take what has arrived, once `work` has ended."""
        parts = self.received.split([place.stop - place.start for place in self.places])
        for place, part in zip(self.places, parts):
            if self.adds:
                self.target[place].add_(part)
            else:
                self.target[place].copy_(part)


class NodeExchange:
    """The routes of one rank. `nodes`: the ranks of each node; this rank is in one of them."""

    def __init__(self, layout: FlatLayout, units: Sequence[Unit], nodes: Sequence[Sequence[int]], rank: int,
                 compute_type: torch.dtype, group: dist.ProcessGroup | None) -> None:
        self.layout, self.nodes, self.rank, self.group = layout, nodes, rank, group
        self.members = list(next(ranks for ranks in nodes if rank in ranks))
        sizes = {len(ranks) for ranks in nodes}
        sums, values = ({size: HeldMap(Slices(units, size, width, trained_only).pieces(units, layout))
                         for size in sizes} for width, trained_only in ((4, True), (compute_type.itemsize, False)))
        self._sums = [(self._of_slices(sums, bucket), self._of_shard(sums, bucket)) for bucket in layout.buckets]
        self._values = [(self._of_shard(values, bucket), self._of_slices(values, bucket)) for bucket in layout.buckets]

    def begin_sums(self, number: int, own_sums: Tensor, total: Tensor) -> Arriving:
        """Send this rank's sums of a bucket; what arrives is to be added to `total`, its slice of the bucket. Every
        rank calls it.
        """
        return self._begin(own_sums, *self._sums[number], total, adds=True)

    def begin_values(self, number: int, values: Tensor, own_values: Tensor) -> Arriving:
        """Send `values`, this rank's slice of a bucket; what arrives is to be copied to `own_values`, its part of the
        node's. Every rank calls it.
        """
        return self._begin(values, *self._values[number], own_values, adds=False)

    def _begin(self, source: Tensor, send: Route, receive: Route, target: Tensor, adds: bool) -> Arriving:
        sent = torch.cat([source[place] for place in send.places] or [source[:0]])
        received, work = sent, None
        if self.group is not None:
            received = source.new_empty(sum(receive.counts))
            work = dist.all_to_all_single(received, sent, receive.counts, send.counts, group=self.group, async_op=True)
        return Arriving(work, received, sent, receive.places, target, adds)

    def _of_slices(self, maps: Mapping[int, HeldMap], bucket: Bucket) -> Route:
        """Return which parts of each rank's shard of a bucket are in this rank's slices: as places in these slices."""
        width = (bucket.stop - bucket.start) // self.layout.world_size
        own, held = self.members.index(self.rank), maps[len(self.members)]
        starts = [bucket.start + rank * width for rank in range(self.layout.world_size)]
        found = [[piece for piece in held.within(start, start + width) if piece.member == own] for start in starts]
        return Route.of(found, lambda piece: slice(piece.offset, piece.offset + piece.stop - piece.start))

    def _of_shard(self, maps: Mapping[int, HeldMap], bucket: Bucket) -> Route:
        """Return which parts of this rank's shard of a bucket are in each rank's slices: as places in its slice of the
        bucket.
        """
        width = (bucket.stop - bucket.start) // self.layout.world_size
        start = bucket.start + self.rank * width
        found: list[list[Held]] = [[] for _ in range(self.layout.world_size)]
        for ranks in self.nodes:
            for piece in maps[len(ranks)].within(start, start + width):
                found[ranks[piece.member]].append(piece)
        return Route.of(found, lambda piece: slice(piece.start - start, piece.stop - start))
