"""What a trial does if best fit leaves items over although the ranks have enough time in total: the items after the
partial schedule are dealt out again, longest first, each to the rank that is free first, and then rebalanced.

    makespan 12    best fit    rank 0  |--5--|--5--|..|        dealt out    rank 0  |--5--|-4-|-3-|
                               rank 1  |-4-|-4-|-3-|.|                      rank 1  |--5--|-4-|-3-|
                   and 3 fits nowhere

Best fit fills one rank after another, and packs small items well into what is left; without small items the rest stays
empty. If items are dealt out, all ranks end at about the same time (longest processing time first, Graham 1969).
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.items import Items, Machine
from dhp_ray.planner.primitives.compiled import inner
from dhp_ray.planner.primitives.heap import sift_down
from dhp_ray.planner.primitives.rebalancing import Loads, packs_s, rebalance
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.step.gaps import free_after
from dhp_ray.planner.step.partial_schedule import PartialSchedule

PARTNERS = 8
"""Number of ranks with which the fullest rank tries to exchange items."""


@inner
def deal_out_tails(
    items: Items, rest: np.ndarray, bins: np.ndarray, partial: PartialSchedule, makespan: float, machine: Machine
) -> float:
    """When the last item of `rest` (largest first) ends if items are dealt out; infinity if the ranks have no time for
    them. If that is within the makespan, their `bins` (`gaps.backfill`) are changed.
    """
    num_gaps, num_ranks, speeds = len(partial.ranks), len(machine.speeds), machine.speeds
    seconds, tokens = np.zeros(len(rest)), np.zeros(len(rest), dtype=np.int64)
    needed_s = 0.0
    for place in range(len(rest)):
        item = items[rest[place]]
        seconds[place], tokens[place] = item.language_s + item.vision_s, item.tokens
        if not 0 <= bins[place] < num_gaps:
            needed_s += seconds[place]
    if needed_s > ((makespan - partial.free) * speeds).sum():
        return np.inf
    loads = Loads(seconds, tokens, speeds, machine.tokens_per_rank, machine.rates[1].overhead_s)
    ends_s, held = partial.free.copy(), np.zeros(num_ranks, dtype=np.int64)
    rank_of, heap, place_of = np.full(len(rest), -1), ascending(ends_s), np.zeros(num_ranks, dtype=np.int64)
    for place in range(len(rest)):
        if not 0 <= bins[place] < num_gaps:
            rank = heap[0]
            rank_of[place] = rank
            ends_s[rank] += seconds[place] / speeds[rank] + packs_s(loads, held[rank], tokens[place])
            held[rank] += tokens[place]
            sift_down(heap, place_of, ends_s, 0, 0, num_ranks)
    rebalance(loads, rank_of, ends_s, held, makespan, PARTNERS)
    dealt = np.where(rank_of >= 0, num_gaps + rank_of, bins)
    end_s = free_after(items, rest, dealt, partial, machine).max()  # with as many packs as the items really form
    if end_s <= makespan:
        bins[:] = dealt
    return end_s
