"""Backfills the idle gaps of a partial schedule, and what is left of every rank until the makespan, with items of
one rank: best fit, largest first.

A bin is a gap or a rank's tail; its room is its length times the rank's speed. An item goes to the bin with the
least room that holds it (`best_fit`). In each bin the items then form packs: each joins the newest one there that
memory lets it join, or begins another. O(items x (log bins + shift)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Items, Machine
from dhp_ray.planner.primitives.best_fit import OWNER, ROOM, add, first_with, rooms_for, shrink
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.step.partial_schedule import PartialSchedule


class Backfilled(NamedTuple):
    """The packs of the bins: the pack of each item, and each pack's rank and start."""

    pack: np.ndarray
    rank: np.ndarray
    start: np.ndarray


@inner
def backfill(items: Items, rest: np.ndarray, partial: PartialSchedule, makespan: float, machine: Machine) -> np.ndarray:
    """The bin of each item of `rest` (largest first): the place of a gap in `partial.ranks`, or their number plus the
    rank; -1 if it fits in none."""
    speeds, pack_s, encoder_pass_s = machine.speeds, machine.rates[1].overhead_s, machine.rates[1].encoder_pass_s
    num_gaps, num_ranks = len(partial.ranks), len(speeds)
    room = np.zeros(num_gaps + num_ranks)
    for group in range(len(partial.item)):
        for gap in range(partial.first[group], partial.first[group + 1]):
            room[gap] = (partial.start[group] - partial.gap_start[gap]) * speeds[partial.ranks[gap]]
    for rank in range(num_ranks):
        room[num_gaps + rank] = (makespan - partial.free[rank]) * speeds[rank]
    rooms, state = rooms_for(len(room))
    for bin_ in range(len(room)):
        add(rooms, state, room[bin_], bin_)
    tokens, chosen = np.zeros(len(room), dtype=np.int64), np.zeros(len(rest), dtype=np.int64)
    has_images = np.zeros(len(room), dtype=np.bool_)
    capacity = machine.tokens_per_rank
    for place in range(len(rest)):
        item = items[rest[place]]
        need = item.language_s + item.vision_s
        found = first_with(rooms, state, need)
        if pack_s + encoder_pass_s > 0.0:  # a new pack costs as well, and the first images of a pack
            while found >= 0:
                bin_ = int(rooms[OWNER, found])
                begins = (tokens[bin_] + item.tokens + capacity - 1) // capacity - (
                    tokens[bin_] + capacity - 1
                ) // capacity
                speed = speeds[bin_ - num_gaps] if bin_ >= num_gaps else speeds[partial.ranks[bin_]]
                once_s = begins * pack_s * speed
                if item.image_s > 0.0 and (begins > 0 or not has_images[bin_]):
                    once_s += encoder_pass_s
                if rooms[ROOM, found] >= need + once_s:
                    need += once_s
                    break
                found -= 1
        if found < 0:
            chosen[place] = -1
            continue
        chosen[place] = int(rooms[OWNER, found])
        tokens[chosen[place]] += item.tokens
        has_images[chosen[place]] |= item.image_s > 0.0
        shrink(rooms, state, found, rooms[ROOM, found] - need)
    return chosen


@compiled
def packs_of_bins(
    items: Items, rest: np.ndarray, bins: np.ndarray, partial: PartialSchedule, machine: Machine
) -> Backfilled:
    """Items of each bin into packs, each into the newest that has room; a bin's packs run one after the other."""
    num_gaps, capacity = len(partial.ranks), machine.tokens_per_rank
    pack = np.zeros(len(rest), dtype=np.int64)
    pack_bin, seconds, pack_tokens = (
        np.zeros(len(rest), dtype=np.int64),
        np.zeros(len(rest)),
        np.zeros(len(rest), dtype=np.int64),
    )
    has_images = np.zeros(len(rest), dtype=np.bool_)
    newest, previous = np.full(num_gaps + len(machine.speeds), -1), np.full(len(rest), -1)  # a bin's packs, as a chain
    count = 0
    for place in range(len(rest)):
        item, into = items[rest[place]], newest[bins[place]]
        while into >= 0 and pack_tokens[into] + item.tokens > capacity:
            into = previous[into]
        if into < 0:
            into = count
            previous[into], newest[bins[place]], pack_bin[into] = newest[bins[place]], into, bins[place]
            count += 1
        pack[place] = into
        pack_tokens[into] += item.tokens
        seconds[into] += item.language_s + item.vision_s
        if item.image_s > 0.0 and not has_images[into]:
            has_images[into] = True
            seconds[into] += machine.rates[1].encoder_pass_s
    rank, start = pack_bin[:count] - num_gaps, np.zeros(count)
    clock = np.concatenate((partial.gap_start, partial.free))
    for into in range(count):
        if rank[into] < 0:
            rank[into] = partial.ranks[pack_bin[into]]
        start[into] = clock[pack_bin[into]]
        clock[pack_bin[into]] += seconds[into] / machine.speeds[rank[into]] + machine.rates[1].overhead_s
    return Backfilled(pack, rank, start)


@inner
def busy_of(items: Items, rest: np.ndarray, bins: np.ndarray, partial: PartialSchedule, machine: Machine) -> np.ndarray:
    """When each rank is free after the partial schedule and the items of its tail."""
    num_gaps, capacity = len(partial.ranks), machine.tokens_per_rank
    busy = partial.free.copy()
    tokens, with_images = np.zeros(len(busy), dtype=np.int64), np.zeros(len(busy), dtype=np.int64)
    for place in range(len(rest)):
        rank = bins[place] - num_gaps
        if rank >= 0:
            item = items[rest[place]]
            busy[rank] += (item.language_s + item.vision_s) / machine.speeds[rank]
            tokens[rank] += item.tokens
            with_images[rank] += item.image_s > 0.0
    for rank in range(len(busy)):
        packs = (tokens[rank] + capacity - 1) // capacity
        busy[rank] += packs * machine.rates[1].overhead_s
        busy[rank] += min(packs, with_images[rank]) * machine.rates[1].encoder_pass_s / machine.speeds[rank]
    return busy
