"""The result of a planner: groups in the order of execution, as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

Ranks = tuple[int, ...]


class Schedule(NamedTuple):
    """Group g runs `rows[first_row[g]:first_row[g + 1]]` on `ranks[first_rank[g]:first_rank[g + 1]]`, ascending, in
    `micro_batch[g]`."""

    rows: np.ndarray
    first_row: np.ndarray
    ranks: np.ndarray
    first_rank: np.ndarray
    micro_batch: np.ndarray


def in_order(schedule: Schedule, order: np.ndarray) -> Schedule:
    """The same groups, group `order[0]` first."""
    rows, first_row = gathered(schedule.rows, schedule.first_row, order)
    ranks, first_rank = gathered(schedule.ranks, schedule.first_rank, order)
    return Schedule(rows, first_row, ranks, first_rank, schedule.micro_batch[order])


def group_of_row(schedule: Schedule) -> np.ndarray:
    """The group that runs each row of the batch."""
    group = np.empty(len(schedule.rows), dtype=np.int64)
    group[schedule.rows] = np.repeat(np.arange(len(schedule.first_row) - 1), np.diff(schedule.first_row))
    return group


def crosses_nodes(schedule: Schedule, node: np.ndarray) -> np.ndarray:
    """Whether each group's ranks are on more than one node; `node`: the node of each rank."""
    nodes, first = node[schedule.ranks], schedule.first_rank[:-1]
    return np.minimum.reduceat(nodes, first) < np.maximum.reduceat(nodes, first)


def firsts_of(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each of several pieces begins in an array that has them one after another, and where the last one ends."""
    firsts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=firsts[1:])
    return firsts


def gathered(values: np.ndarray, first: np.ndarray, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pieces `values[first[p]:first[p + 1]]` for p in `pieces`, one after another, and where each begins."""
    sizes = first[pieces + 1] - first[pieces]
    firsts = firsts_of(sizes)
    return values[np.repeat(first[pieces] - firsts[:-1], sizes) + np.arange(firsts[-1])], firsts


def by_owner(owner: np.ndarray, num_owners: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices grouped by their owner, in order, and where each owner's begin."""
    return np.argsort(owner, kind="stable"), firsts_of(np.bincount(owner, minlength=num_owners))


def flat(pieces: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """All numbers one after another, and the size of each piece."""
    return np.array(list(chain.from_iterable(pieces)), dtype=np.int64), np.array(
        [len(piece) for piece in pieces], dtype=np.int64
    )


def first_of_its_kind(kind: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Whether each (kind, number) appears for the first time."""
    order = np.lexsort((number, kind))
    same = (np.diff(kind[order]) == 0) & (np.diff(number[order]) == 0)
    first = np.ones(len(order), dtype=bool)
    first[order[1:][same]] = False
    return first


def renamed(schedule: Schedule, order: np.ndarray) -> Schedule:
    """A schedule of the reordered ranks, mapped back to the ranks that they stand for; those of a group ascend."""
    ranks, group = (
        order[schedule.ranks],
        np.repeat(np.arange(len(schedule.first_rank) - 1), np.diff(schedule.first_rank)),
    )
    return schedule._replace(ranks=ranks[np.lexsort((ranks, group))])
