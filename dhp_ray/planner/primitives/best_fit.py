"""Best fit: among many rooms, find the smallest that holds a need. Made for needs that fall, or nearly so. And best-fit
decreasing: sequences into packs, by memory only (arXiv 2602.21788, stage 1).

Rooms that hold the least need so far, or more, are kept sorted; smaller rooms wait in a heap until the needs have
fallen to them. If needs fall, the smallest room that holds one is the last of the sorted rooms, and what is left of it
goes to the end again or to the heap: O(log n) each, without shifting. A need that rises costs a binary search and a
shift.

    need 5:  sorted 9 7 6 | heap 4 2     6 is taken, 1 is left of it, to the heap
    need 4:  sorted 9 7 4 | heap 2 1     4 came down from the heap

Everything is in two arrays, because compiled loops pass arrays for free and tuples of arrays at a cost: `rooms` (4, n)
and `state` (3,).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.schedule import by_owner

ROOM, OWNER, WAITING, WAITING_OWNER = 0, 1, 2, 3
"""Rows of `rooms`: the sorted rooms (falling) and their owners, then the heap (largest first) and its owners."""

SORTED, HEAP, FLOOR = 0, 1, 2
"""Entries of `state`: number of sorted rooms, number of waiting rooms, and the least need so far."""


@inner
def rooms_for(most: int) -> tuple[np.ndarray, np.ndarray]:
    """Space for `most` rooms, none used yet: (rooms, state)."""
    state = np.zeros(3)
    state[FLOOR] = np.inf
    return np.zeros((4, most)), state


@inner
def first_with(rooms: np.ndarray, state: np.ndarray, need: float) -> int:
    """The place of the smallest room that holds `need`, -1 if none does; rooms at earlier places are larger."""
    if need < state[FLOOR]:
        state[FLOOR] = need
        while state[HEAP] > 0 and rooms[WAITING, 0] >= need:
            last = int(state[SORTED])
            rooms[ROOM, last], rooms[OWNER, last] = rooms[WAITING, 0], rooms[WAITING_OWNER, 0]
            state[SORTED] += 1
            _drop_largest(rooms, state)
    low, high = 0, int(state[SORTED])
    if high > 0 and rooms[ROOM, high - 1] >= need:
        return high - 1
    while low < high:
        middle = (low + high) // 2
        if rooms[ROOM, middle] >= need:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inner
def largest(rooms: np.ndarray, state: np.ndarray) -> float:
    """The largest room, 0 if there is none."""
    of_sorted = rooms[ROOM, 0] if state[SORTED] > 0 else 0.0
    return max(of_sorted, rooms[WAITING, 0] if state[HEAP] > 0 else 0.0)


@inner
def shrink(rooms: np.ndarray, state: np.ndarray, place: int, left: float) -> None:
    owner, count = rooms[OWNER, place], int(state[SORTED])
    while place + 1 < count and (rooms[ROOM, place + 1] > left or left < state[FLOOR]):
        rooms[ROOM, place], rooms[OWNER, place] = rooms[ROOM, place + 1], rooms[OWNER, place + 1]
        place += 1
    if left >= state[FLOOR]:
        rooms[ROOM, place], rooms[OWNER, place] = left, owner
    else:
        state[SORTED] -= 1
        state[HEAP] += 1
        _rise(rooms, int(state[HEAP]) - 1, left, owner)


@inner
def add(rooms: np.ndarray, state: np.ndarray, left: float, owner: int) -> None:
    if left < state[FLOOR]:
        state[HEAP] += 1
        _rise(rooms, int(state[HEAP]) - 1, left, owner)
        return
    place = int(state[SORTED])
    state[SORTED] += 1
    while place > 0 and rooms[ROOM, place - 1] < left:
        rooms[ROOM, place], rooms[OWNER, place] = rooms[ROOM, place - 1], rooms[OWNER, place - 1]
        place -= 1
    rooms[ROOM, place], rooms[OWNER, place] = left, owner


@inner
def _rise(rooms: np.ndarray, place: int, left: float, owner: float) -> None:
    while place > 0 and rooms[WAITING, (place - 1) // 2] < left:
        above = (place - 1) // 2
        rooms[WAITING, place], rooms[WAITING_OWNER, place] = rooms[WAITING, above], rooms[WAITING_OWNER, above]
        place = above
    rooms[WAITING, place], rooms[WAITING_OWNER, place] = left, owner


@inner
def _drop_largest(rooms: np.ndarray, state: np.ndarray) -> None:
    """Remove the top of the heap: the gap sinks to a leaf, and the last entry rises from there."""
    state[HEAP] -= 1
    count, place = int(state[HEAP]), 0
    left, owner = rooms[WAITING, count], rooms[WAITING_OWNER, count]
    while 2 * place + 1 < count:
        below = 2 * place + 1
        if below + 1 < count:
            below += int(rooms[WAITING, below + 1] > rooms[WAITING, below])
        rooms[WAITING, place], rooms[WAITING_OWNER, place] = rooms[WAITING, below], rooms[WAITING_OWNER, below]
        place = below
    _rise(rooms, place, left, owner)


class Packs(NamedTuple):
    """Pack p holds `rows[first[p]:first[p + 1]]`, longest first."""

    rows: np.ndarray
    first: np.ndarray


def best_fit_decreasing(tokens: np.ndarray, capacity: np.ndarray) -> Packs:
    """Packs of the sequences of these lengths, in the order in which they were opened. O(K log K) comparisons.

    A pack has the capacity of its first (longest) sequence, in tokens. A sequence goes to the open pack with the least
    room that holds it. (If capacities follow lengths, a later sequence never needs more capacity than a pack has,
    because sequences come longest first.)
    """
    longest_first = np.argsort(-tokens, kind="stable")
    pack, count = _packs(tokens, capacity, longest_first)
    order, first = by_owner(pack, count)
    return Packs(longest_first[order], first)


@compiled
def _packs(tokens: np.ndarray, capacity: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, int]:
    """(pack of each sequence of `order`, number of packs)"""
    pack, count = np.zeros(len(order), dtype=np.int64), 0
    rooms, state = rooms_for(len(order))
    for place in range(len(order)):
        row = order[place]
        found = first_with(rooms, state, tokens[row])
        if found < 0:
            pack[place] = count
            add(rooms, state, capacity[row] - tokens[row], count)
            count += 1
        else:
            pack[place] = int(rooms[OWNER, found])
            shrink(rooms, state, found, rooms[ROOM, found] - tokens[row])
    return pack, count
