"""Moves one version of the state from the shards of one membership to those of the next, in memory.

    old layout    rank 0 | rank 1 (lost) | rank 2          a local shard: what a rank has of an old rank's
                     |          | its replica |
    new rank 0 supplies 0     |      new rank 1 supplies 1 and 2
                     \\        v        v
    new layout       rank 0   |   rank 1                   every new rank gets the intervals that it wants

Layouts are lists of pieces, intervals of flattened parameters: any number of ranks, any buckets, either engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from dhp_ray.train.state.shards import CPU, LocalShard, Piece, ShardState

Offer = tuple[int, int, int, Sequence[Piece]]
"""A LocalShard as it is sent: owner, version, vision updates, pieces."""


class _Transfer(NamedTuple):
    """Elements to move: `source` of the supplier's local shard number `shard` to `target` of the new shard."""

    shard: int
    source: slice
    target: slice

    @property
    def length(self) -> int:
        return self.target.stop - self.target.start


def reshard(
    supplies: Sequence[LocalShard], wanted: Sequence[Piece], shard_size: int, rank: int, group: dist.ProcessGroup | None
) -> ShardState:
    """Return this rank's shard of the new layout, in host memory: `shard_size` elements, of which `wanted` are filled
    and the others are 0.

    Every rank of the new membership calls this on a gloo group of them all; None is for a single rank. `supplies` are
    the shards that this rank is to supply: each old rank's shard is supplied by exactly one new rank, all in one
    version. Values are moved, never computed with: the result is bit for bit what was supplied. ValueError, on all
    ranks alike: an interval that nobody supplies, a shard supplied twice, or two versions.
    """
    offer: list[Offer] = [(shard.owner, shard.version, shard.state.vision_updates, shard.pieces)
                          for shard in supplies]
    offers, wants = _all_of(offer, wanted, group)
    version = _common_version(offers)
    sends, receives = _routes(offers, wants, rank)
    kept = sends.pop(rank, [])
    receives.pop(rank, None)
    state = ShardState.zeros(shard_size, CPU)
    for kind, target in state.tensors().items():  # one after the other: a third of the state is in buffers at a time
        sources = [shard.state.tensors()[kind].to(CPU) for shard in supplies]
        for part in kept:
            target[part.target].copy_(sources[part.shard][part.source])
        if group is not None:
            _exchange(sources, target, sends, receives, group)
    state.version = version
    state.vision_updates = next(updates for offered in offers for _, _, updates, _ in offered)  # equal on all
    return state


def _all_of(
    offer: list[Offer], wanted: Sequence[Piece], group: dist.ProcessGroup | None
) -> tuple[list[list[Offer]], list[Sequence[Piece]]]:
    """Return what each new rank supplies and wants."""
    if group is None:
        return [offer], [wanted]
    described: list[tuple[list[Offer], Sequence[Piece]]] = [([], [])] * group.size()
    dist.all_gather_object(described, (offer, wanted), group=group)
    return [offered for offered, _ in described], [intervals for _, intervals in described]


def _common_version(offers: list[list[Offer]]) -> int:
    versions: dict[int, int] = {}
    suppliers: dict[int, int] = {}
    for supplier, offered in enumerate(offers):
        for owner, version, _, _ in offered:
            if owner in suppliers:
                raise ValueError(
                    f"state: the shard of old rank {owner} is supplied by ranks {suppliers[owner]} and {supplier}; "
                    "allowed: one"
                )
            suppliers[owner] = supplier
            versions[version] = owner
    if len(versions) != 1:
        named = ", ".join(f"{version} (old rank {owner})" for version, owner in sorted(versions.items())) or "none"
        raise ValueError(f"state: got versions {named}; allowed: one")
    return next(iter(versions))


def _routes(
    offers: list[list[Offer]], wants: list[Sequence[Piece]], rank: int
) -> tuple[dict[int, list[_Transfer]], dict[int, list[_Transfer]]]:
    """Return what `rank` sends to each rank and receives from each; both ends list a pair's parts in the order in which
    they are wanted.

    Every rank goes through all wanted intervals, so that all ranks refuse what nobody supplies.
    """
    supplied: dict[str, list[tuple[int, int, int, int, int]]] = {}
    for supplier, offered in enumerate(offers):
        for number, (*_, intervals) in enumerate(offered):
            for name, start, stop, offset in intervals:
                supplied.setdefault(name, []).append((start, stop, offset, supplier, number))
    for found in supplied.values():
        found.sort()
    starts = {name: [interval[0] for interval in found] for name, found in supplied.items()}
    sends: dict[int, list[_Transfer]] = {}
    receives: dict[int, list[_Transfer]] = {}
    for receiver, intervals in enumerate(wants):
        for name, begin, end, offset in intervals:
            found = supplied.get(name, [])
            place = bisect_right(starts.get(name, []), begin) - 1
            position = begin
            while position < end:
                nothing = (end, end, 0, 0, 0)
                start, stop, source_offset, supplier, number = found[place] if 0 <= place < len(found) else nothing
                if not start <= position < stop:
                    following = starts.get(name, [])[place + 1:place + 2] if position >= stop else [start]
                    raise ValueError(
                        f"state: nobody supplies elements {position} to {min([end, *following])} of parameter {name}"
                    )
                length = min(stop, end) - position
                source, target = source_offset + position - start, offset + position - begin
                part = _Transfer(number, slice(source, source + length), slice(target, target + length))
                if supplier == rank:
                    sends.setdefault(receiver, []).append(part)
                if receiver == rank:
                    receives.setdefault(supplier, []).append(part)
                position += length
                place += 1
    return sends, receives


def _exchange(
    sources: list[Tensor],
    target: Tensor,
    sends: dict[int, list[_Transfer]],
    receives: dict[int, list[_Transfer]],
    group: dist.ProcessGroup,
) -> None:
    """Exchange one tensor of the state between all ranks, in one collective."""
    ranks = range(group.size())
    send_counts = [sum(part.length for part in sends.get(other, [])) for other in ranks]
    receive_counts = [sum(part.length for part in receives.get(other, [])) for other in ranks]
    outgoing, incoming = target.new_empty(sum(send_counts)), target.new_empty(sum(receive_counts))
    going = [part for other in ranks for part in sends.get(other, [])]
    for part, (start, stop) in zip(going, _edges(going)):
        outgoing[start:stop].copy_(sources[part.shard][part.source])
    dist.all_to_all_single(incoming, outgoing, receive_counts, send_counts, group=group)
    coming = [part for other in ranks for part in receives.get(other, [])]
    for part, (start, stop) in zip(coming, _edges(coming)):
        target[part.target].copy_(incoming[start:stop])


def _edges(parts: list[_Transfer]) -> Iterable[tuple[int, int]]:
    return pairwise(accumulate((part.length for part in parts), initial=0))
