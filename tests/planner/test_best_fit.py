"""The least room that holds a need, and best-fit decreasing, against plain lists."""

import bisect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhp_ray.planner.primitives.best_fit import OWNER, ROOM, add, best_fit_decreasing, first_with, rooms_for, shrink
from dhp_ray.planner.primitives.compiled import compiled


@compiled
def served(room, need):
    """The owner of the room that serves each need, -1 where none does; half of the rooms come when half of the needs
    have been served.
    """
    rooms, state = rooms_for(len(room))
    owners = np.full(len(need), -1)
    for owner in range(len(room) // 2):
        add(rooms, state, room[owner], owner)
    for index in range(len(need)):
        if index == len(need) // 2:
            for owner in range(len(room) // 2, len(room)):
                add(rooms, state, room[owner], owner)
        place = first_with(rooms, state, need[index])
        if place >= 0:
            owners[index] = int(rooms[OWNER, place])
            shrink(rooms, state, place, rooms[ROOM, place] - need[index])
    return owners


@pytest.mark.seconds
@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.lists(st.integers(1, 30), min_size=1, max_size=80),
       st.booleans())
def test_the_least_room_that_holds_a_need(room, need, falling):
    need = sorted(need, reverse=True) if falling else need
    left = {owner: room[owner] for owner in range(len(room) // 2)}
    for index, (wanted, owner) in enumerate(zip(need, served(np.array(room, dtype=float),
                                                             np.array(need, dtype=float)).tolist())):
        if index == len(need) // 2:
            left |= {owner: room[owner] for owner in range(len(room) // 2, len(room))}
        fitting = [size for size in left.values() if size >= wanted]
        assert (owner == -1) == (not fitting)
        if fitting:
            assert left[owner] == min(fitting)
            left[owner] -= wanted


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(50, 120))
def test_best_fit_decreasing(lengths, tokens_per_rank):
    tokens = np.array(lengths)
    capacity = -(-tokens // tokens_per_rank) * tokens_per_rank
    packs = best_fit_decreasing(tokens, capacity)
    assert sorted(packs.rows.tolist()) == list(range(len(lengths)))
    found = [tokens[packs.rows[begin:end]] for begin, end in zip(packs.first, packs.first[1:])]
    rooms = []  # what is left in each pack, rising
    for need in sorted(lengths, reverse=True):
        place = bisect.bisect_left(rooms, need)
        room = rooms.pop(place) if place < len(rooms) else -(-need // tokens_per_rank) * tokens_per_rank
        bisect.insort(rooms, room - need)
    assert sorted(-(-pack[0] // tokens_per_rank) * tokens_per_rank - pack.sum() for pack in found) == rooms
    assert all((np.diff(pack) <= 0).all() for pack in found)
