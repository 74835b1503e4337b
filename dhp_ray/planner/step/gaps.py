"""Backfills the idle gaps of a partial schedule, and the rest of every rank up to the makespan, with items of one rank:
best fit, largest first.

A bin is a gap or the tail of a rank; its room is its length times the rank's speed. An item goes to the bin with the
least room that holds it (`best_fit`). There it joins the newest pack with enough memory left, or it begins another
pack, which takes room as well:

    items of 5, 5 and 3 tokens and seconds    a pack holds 7 tokens and takes 1 s    |1|--5--|1|--5--|1|-3-|

O(items x (log bins + shift + bins tried)). Most bins that are tried have no time for another pack, and no pack with
enough memory left for anything as large as the item: such a bin is refused in O(1), any other takes its packs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Item, Items, Machine
from dhp_ray.planner.primitives.best_fit import OWNER, ROOM, add, first_with, rooms_for, shrink
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.step.partial_schedule import PartialSchedule

NO_PACK = 2**62
"""The tokens of the emptiest pack, for a bin without packs: more than any pack has."""


class Backfilled(NamedTuple):
    """The packs in the bins: the pack of each item (-1: it has no bin), and each pack's rank and start."""

    pack: np.ndarray
    rank: np.ndarray
    start: np.ndarray


class BinPacks(NamedTuple):
    """Packs that are being filled: the bin of each, its tokens, whether it has images, and the previous pack in its
    bin; the newest pack of each bin. -1 stands for none. `made[0]`: number of packs.
    """

    bin_: np.ndarray
    tokens: np.ndarray
    has_images: np.ndarray
    before: np.ndarray
    newest: np.ndarray
    made: np.ndarray


@inner
def backfill(items: Items, rest: np.ndarray, partial: PartialSchedule, makespan: float, machine: Machine) -> np.ndarray:
    """The bin of each item of `rest` (largest first): the index of a gap in `partial.ranks`, or their number plus the
    rank; -1 if it fits in no bin.
    """
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
    packs, chosen = _no_packs(len(rest), len(room)), np.full(len(rest), -1)
    fewest_tokens, least_pack_s = np.full(len(room), NO_PACK), pack_s * machine.slowest  # of a bin's emptiest pack
    for place in range(len(rest)):
        item = items[rest[place]]
        need = item.language_s + item.vision_s
        found = first_with(rooms, state, need)
        while found >= 0:
            bin_ = int(rooms[OWNER, found])
            if (fewest_tokens[bin_] + item.tokens > machine.tokens_per_rank
                    and rooms[ROOM, found] < need + least_pack_s):
                found -= 1
                continue
            into = _pack_with_room(packs, bin_, item.tokens, machine.tokens_per_rank)
            once_s = 0.0
            if into < 0:
                fewest_tokens[bin_] = _fewest_tokens(packs, bin_)  # packs may have been joined since
                once_s = pack_s * (speeds[bin_ - num_gaps] if bin_ >= num_gaps else speeds[partial.ranks[bin_]])
            if item.image_s > 0.0 and (into < 0 or not packs.has_images[into]):
                once_s += encoder_pass_s
            if rooms[ROOM, found] >= need + once_s:
                chosen[place] = bin_
                if into < 0:
                    fewest_tokens[bin_] = min(fewest_tokens[bin_], item.tokens)
                _join(packs, bin_, into, item)
                shrink(rooms, state, found, rooms[ROOM, found] - need - once_s)
                break
            found -= 1
    return chosen


@compiled
def packs_of_bins(
    items: Items, rest: np.ndarray, bins: np.ndarray, partial: PartialSchedule, machine: Machine
) -> Backfilled:
    """Divide the items of each bin into packs: each item joins the newest pack that has room. The packs of a bin run
    one after another.
    """
    return _in_packs(items, rest, bins, partial, machine)[0]


@inner
def free_after(
    items: Items, rest: np.ndarray, bins: np.ndarray, partial: PartialSchedule, machine: Machine
) -> np.ndarray:
    """When each rank becomes free after the partial schedule and the items of its tail."""
    return _in_packs(items, rest, bins, partial, machine)[1]


@inner
def _in_packs(
    items: Items, rest: np.ndarray, bins: np.ndarray, partial: PartialSchedule, machine: Machine
) -> tuple[Backfilled, np.ndarray]:
    """(the packs of the items with a bin, when each rank becomes free after those of its tail)"""
    num_gaps, pack = len(partial.ranks), np.full(len(rest), -1)
    packs, seconds = _no_packs(len(rest), num_gaps + len(machine.speeds)), np.zeros(len(rest))
    for place in range(len(rest)):
        if bins[place] < 0:
            continue
        item = items[rest[place]]
        into = _pack_with_room(packs, bins[place], item.tokens, machine.tokens_per_rank)
        once_s = 0.0
        if item.image_s > 0.0 and (into < 0 or not packs.has_images[into]):
            once_s = machine.rates[1].encoder_pass_s
        pack[place] = _join(packs, bins[place], into, item)
        seconds[pack[place]] += item.language_s + item.vision_s + once_s
    count = packs.made[0]
    rank, start = packs.bin_[:count] - num_gaps, np.zeros(count)
    clock = np.concatenate((partial.gap_start, partial.free))
    for into in range(count):
        if rank[into] < 0:
            rank[into] = partial.ranks[packs.bin_[into]]
        start[into] = clock[packs.bin_[into]]
        clock[packs.bin_[into]] += seconds[into] / machine.speeds[rank[into]] + machine.rates[1].overhead_s
    return Backfilled(pack, rank, start), clock[num_gaps:]


@inner
def _no_packs(most: int, num_bins: int) -> BinPacks:
    """Space for `most` packs, none used yet."""
    return BinPacks(
        np.zeros(most, dtype=np.int64),
        np.zeros(most, dtype=np.int64),
        np.zeros(most, dtype=np.bool_),
        np.zeros(most, dtype=np.int64),
        np.full(num_bins, -1),
        np.zeros(1, dtype=np.int64),
    )


@inner
def _pack_with_room(packs: BinPacks, bin_: int, num_tokens: int, capacity: int) -> int:
    """The newest pack of a bin that has room for `num_tokens` tokens; -1 if none has."""
    into = packs.newest[bin_]
    while into >= 0 and packs.tokens[into] + num_tokens > capacity:
        into = packs.before[into]
    return int(into)


@inner
def _fewest_tokens(packs: BinPacks, bin_: int) -> int:
    """Tokens of the emptiest pack of a bin."""
    fewest, pack = NO_PACK, packs.newest[bin_]
    while pack >= 0:
        fewest, pack = min(fewest, packs.tokens[pack]), packs.before[pack]
    return int(fewest)


@inner
def _join(packs: BinPacks, bin_: int, into: int, item: Item) -> int:
    """Add an item to a pack of a bin, or to a new pack if `into` is -1; return the pack's number."""
    if into < 0:
        into = packs.made[0]
        packs.made[0] += 1
        packs.bin_[into], packs.before[into], packs.newest[bin_] = bin_, packs.newest[bin_], into
    packs.tokens[into] += item.tokens
    packs.has_images[into] |= item.image_s > 0.0
    return into
