"""Fills the holes of a skeleton, and what is left of every rank until the makespan, with items of one rank: best fit, largest first.

A bin is a hole or a rank's tail; its room is its length times the rank's speed. An item goes to the bin with the least room that holds it; the bins are kept
sorted by room, so that is a binary search and a short shift. In each bin the items then form as few packs as memory allows, first fit.
O(items x (log bins + shift)).
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.compiled import compiled, inner
from dhp_ray.planner.items import Items, Machine
from dhp_ray.planner.skeleton import Skeleton
from dhp_ray.planner.sorting import ascending


@inner
def fill(items: Items, rest: np.ndarray, skeleton: Skeleton, makespan: float, machine: Machine) -> np.ndarray:
    """The bin of each item of `rest` (largest first): a hole's index, or the number of holes plus the rank; -1 if it fits in none."""
    speeds, tables = machine.speeds, machine.tables
    num_holes, num_ranks = len(skeleton.hole_rank), len(speeds)
    room = np.zeros(num_holes + num_ranks)
    for hole in range(num_holes):
        room[hole] = skeleton.hole_length[hole] * speeds[skeleton.hole_rank[hole]]
    for rank in range(num_ranks):
        room[num_holes + rank] = (makespan - skeleton.free[rank]) * speeds[rank]
    order = ascending(room)
    room = room[order]
    tokens = np.zeros(len(order), dtype=np.int64)
    chosen = np.zeros(len(rest), dtype=np.int64)
    capacity = machine.tokens_per_rank
    for place in range(len(rest)):
        item = rest[place]
        need = items.language_s[item] + items.vision_s[item]
        low, high = 0, len(room)
        while low < high:
            middle = (low + high) // 2
            if room[middle] < need:
                low = middle + 1
            else:
                high = middle
        found = low
        if tables.pack_s > 0.0:  # a new pack costs as well
            while found < len(room):
                begins = (tokens[order[found]] + items.tokens[item] + capacity - 1) // capacity - (tokens[order[found]] + capacity - 1) // capacity
                rank = order[found] - num_holes
                speed = speeds[rank] if rank >= 0 else speeds[skeleton.hole_rank[order[found]]]
                if room[found] >= need + begins * tables.pack_s * speed:
                    need += begins * tables.pack_s * speed
                    break
                found += 1
        if found == len(room):
            chosen[place] = -1
            continue
        chosen[place] = order[found]
        tokens[order[found]] += items.tokens[item]
        left, bin_ = room[found] - need, order[found]
        while found > 0 and room[found - 1] > left:
            room[found], order[found] = room[found - 1], order[found - 1]
            found -= 1
        room[found], order[found] = left, bin_
    return chosen


@compiled
def packs_of_bins(items: Items, rest: np.ndarray, bins: np.ndarray, num_bins: int, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items of each bin into packs, first fit: (pack of each item of `rest`, bin of each pack, seconds of one nominal rank of each pack)."""
    pack = np.zeros(len(rest), dtype=np.int64)
    pack_bin, pack_s, pack_tokens = np.zeros(len(rest), dtype=np.int64), np.zeros(len(rest)), np.zeros(len(rest), dtype=np.int64)
    newest, previous = np.full(num_bins, -1), np.full(len(rest), -1)  # a bin's packs, as a chain
    count = 0
    for place in range(len(rest)):
        item, into = rest[place], newest[bins[place]]
        while into >= 0 and pack_tokens[into] + items.tokens[item] > capacity:
            into = previous[into]
        if into < 0:
            into = count
            previous[into], newest[bins[place]], pack_bin[into] = newest[bins[place]], into, bins[place]
            count += 1
        pack[place] = into
        pack_tokens[into] += items.tokens[item]
        pack_s[into] += items.language_s[item] + items.vision_s[item]
    return pack, pack_bin[:count], pack_s[:count]


@inner
def busy_of(items: Items, rest: np.ndarray, bins: np.ndarray, skeleton: Skeleton, machine: Machine) -> np.ndarray:
    """When each rank is free after the skeleton and the items of its tail."""
    num_holes, capacity = len(skeleton.hole_rank), machine.tokens_per_rank
    busy = skeleton.free.copy()
    tokens = np.zeros(len(busy), dtype=np.int64)
    for place in range(len(rest)):
        rank = bins[place] - num_holes
        if rank >= 0:
            busy[rank] += (items.language_s[rest[place]] + items.vision_s[rest[place]]) / machine.speeds[rank]
            tokens[rank] += items.tokens[rest[place]]
    if machine.tables.pack_s > 0.0:
        for rank in range(len(busy)):
            busy[rank] += (tokens[rank] + capacity - 1) // capacity * machine.tables.pack_s
    return busy
