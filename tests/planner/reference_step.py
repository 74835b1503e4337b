"""A reference for `sync=step`: list scheduling, longest first, by bisection of the makespan. Slow and obvious.

For a makespan T, sequences come longest first. Each is tried on one rank, two ranks, and so on, always on the ranks
that are free first (of all, and of each node), and takes the fewest ranks on which it ends by T. If one ends by T on
no number of ranks, T cannot be had. T is halved between one that can be had and one that cannot.

    sequences of 6, 3, 2 and 1 seconds, 3 ranks, T = 4:     rank 0  |--6--|1|
                                                            rank 1  |--6--|
                                                            rank 2  |--3--|     2 ends by T on no ranks: T is too short

Sources: list scheduling (Graham 1969); the fewest ranks that meet a trial makespan (Mounie, Rapine and Trystram 1999),
found by bisection (Hochbaum and Shmoys 1987).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.planner.reference_cost import Batch

PRECISION = 1e-3
"""The bisection ends when the two makespans differ by this share."""


class Placed(NamedTuple):
    """A sequence on its ranks, from its start to its end."""

    row: int
    ranks: tuple[int, ...]
    start_s: float
    end_s: float


def reference_step(batch: Batch) -> list[Placed]:
    """The shortest schedule that the bisection finds."""
    too_short_s, long_enough_s = 0.0, 1e-3
    best = schedule_within(long_enough_s, batch)
    while best is None:
        too_short_s, long_enough_s = long_enough_s, 2 * long_enough_s
        best = schedule_within(long_enough_s, batch)
    while long_enough_s - too_short_s > PRECISION * long_enough_s:
        middle_s = (too_short_s + long_enough_s) / 2
        found = schedule_within(middle_s, batch)
        if found is None:
            too_short_s = middle_s
        else:
            best, long_enough_s = found, end_s(found)
    return best


def step_time_s(batch: Batch) -> float:
    """Seconds of the whole step under the reference's schedule."""
    return batch.cost.fixed_s + end_s(reference_step(batch))


def end_s(schedule: Sequence[Placed]) -> float:
    return max(placed.end_s for placed in schedule)


def schedule_within(limit_s: float, batch: Batch) -> list[Placed] | None:
    """Every sequence placed so that it ends within the limit, or None."""
    free_s = [0.0] * batch.cluster.num_ranks
    schedule = []
    for row in batch.longest_first():
        placed = on_fewest_ranks(row, limit_s, free_s, batch)
        if placed is None:
            return None
        for rank in placed.ranks:
            free_s[rank] = placed.end_s
        schedule.append(placed)
    return schedule


def on_fewest_ranks(row: int, limit_s: float, free_s: Sequence[float], batch: Batch) -> Placed | None:
    """A sequence on the fewest ranks on which it ends within the limit, where it ends first; None if there are none."""
    for degree in range(1, batch.cluster.num_ranks + 1):
        if not batch.holds([row], degree):
            continue
        ways = []
        for ranks in ranks_free_first(degree, free_s, batch):
            start_s = max(free_s[rank] for rank in ranks)
            ways.append(Placed(row, ranks, start_s, start_s + batch.pack_time_s([row], ranks)))
        first = min(ways, key=lambda placed: placed.end_s)
        if first.end_s <= limit_s:
            return first
    return None


def ranks_free_first(degree: int, free_s: Sequence[float], batch: Batch) -> Iterator[tuple[int, ...]]:
    """So many ranks that are free first: of all, and of each node that has as many."""
    cluster = batch.cluster
    by_free = sorted(range(cluster.num_ranks), key=lambda rank: (free_s[rank], -cluster.speeds[rank]))
    yield tuple(sorted(by_free[:degree]))
    for node in sorted(set(cluster.nodes)):
        inside = [rank for rank in by_free if cluster.nodes[rank] == node]
        if len(inside) >= degree:
            yield tuple(sorted(inside[:degree]))
