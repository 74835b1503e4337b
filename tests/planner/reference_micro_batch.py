"""A reference for `sync=micro_batch`: micro-batches filled under one limit of their time, the best limit of a list.

For a limit T, a micro-batch takes the sequences that are left, longest first. Each goes into the first pack that holds
it and still ends within T; else it opens a pack on the fewest ranks on which it ends within T, if so many are left;
else it waits for another micro-batch. Ranks meet at every layer, so a micro-batch lasts as long as the longest encoding
of any pack plus the longest rest of any, and all pay `fixed_s` once.

    sequences of 6, 3, 2 and 1 seconds, 3 ranks, T = 4:     rank 0  |--6--|
                                                            rank 1  |--6--|
                                                            rank 2  |--3 1--|     2 waits for the next micro-batch

Sources: first fit, longest first, under a capacity in time (MULTIFIT, Coffman, Garey and Johnson 1978).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.planner.reference_cost import Batch

LIMITS = 16
"""Limits that are tried."""


class Pack(NamedTuple):
    """Sequences that run together, and their ranks."""

    rows: tuple[int, ...]
    ranks: tuple[int, ...]


def reference_micro_batch(batch: Batch) -> list[list[Pack]]:
    """The micro-batches under the best limit."""
    alone_s = [least_time_s(row, batch) for row in batch.longest_first()]
    ratio = max(4.0, sum(alone_s) / max(alone_s)) ** (1 / (LIMITS - 1))
    ways = [micro_batches_within(max(alone_s) * ratio**power, batch) for power in range(LIMITS)]
    return min(ways, key=lambda micro_batches: time_s(micro_batches, batch))


def micro_batch_time_s(batch: Batch) -> float:
    """Seconds of the whole step under the reference's micro-batches."""
    return time_s(reference_micro_batch(batch), batch)


def time_s(micro_batches: Sequence[Sequence[Pack]], batch: Batch) -> float:
    """Each micro-batch's longest encoding and longest rest, and fixed_s for each."""
    seconds = 0.0
    for packs in micro_batches:
        encodings_s = [batch.encoding_s(pack.rows, pack.ranks) for pack in packs]
        rests_s = [batch.pack_time_s(pack.rows, pack.ranks) - encoding_s
                   for pack, encoding_s in zip(packs, encodings_s)]
        seconds += max(encodings_s) + max(rests_s) + batch.cost.fixed_s
    return seconds


def micro_batches_within(limit_s: float, batch: Batch) -> list[list[Pack]]:
    """Micro-batches, one after the other, until nothing is left."""
    left, micro_batches = batch.longest_first(), []
    while left:
        packs, left = fill(limit_s, left, batch)
        micro_batches.append(packs)
    return micro_batches


def fill(limit_s: float, longest_first: Sequence[int], batch: Batch) -> tuple[list[Pack], list[int]]:
    """(the packs of one micro-batch, the sequences that wait)"""
    unused = fastest_first(batch)
    packs: list[Pack] = []
    waiting: list[int] = []
    for row in longest_first:
        place = first_that_fits(row, packs, limit_s, batch)
        opened = None if place is not None else on_fewest_ranks(row, unused, limit_s, batch)
        if place is not None:
            packs[place] = Pack((*packs[place].rows, row), packs[place].ranks)
        elif opened is not None:
            packs.append(opened)
            unused = [rank for rank in unused if rank not in opened.ranks]
        else:
            waiting.append(row)
    return packs, waiting


def first_that_fits(row: int, packs: Sequence[Pack], limit_s: float, batch: Batch) -> int | None:
    """The first pack that holds the sequence beside its own and still ends within the limit."""
    for place, pack in enumerate(packs):
        rows = (*pack.rows, row)
        if batch.holds(rows, len(pack.ranks)) and batch.pack_time_s(rows, pack.ranks) <= limit_s:
            return place
    return None


def on_fewest_ranks(row: int, unused: Sequence[int], limit_s: float, batch: Batch) -> Pack | None:
    """A pack of its own on the fewest unused ranks on which it ends within the limit; None if there are too few."""
    for degree in range(1, len(unused) + 1):
        ranks = tuple(sorted(unused[:degree]))
        if batch.holds([row], degree) and batch.pack_time_s([row], ranks) <= limit_s:
            return Pack((row,), ranks)
    return None


def least_time_s(row: int, batch: Batch) -> float:
    """The least seconds of a sequence in a micro-batch of its own."""
    ranks = fastest_first(batch)
    degrees = [degree for degree in range(1, len(ranks) + 1) if batch.holds([row], degree)]
    return min(batch.pack_time_s([row], ranks[:degree]) for degree in degrees)


def fastest_first(batch: Batch) -> list[int]:
    """All ranks; of equally fast ones, those of a node one after the other."""
    cluster = batch.cluster
    return sorted(range(cluster.num_ranks), key=lambda rank: (-cluster.speeds[rank], cluster.nodes[rank], rank))
