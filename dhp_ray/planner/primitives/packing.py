"""Best-fit decreasing: sequences into packs, by memory only (arXiv 2602.21788, stage 1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.primitives.best_fit import OWNER, ROOM, add, first_with, rooms_for, shrink
from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.schedule import by_owner


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
