"""One micro-batch under a makespan: which of the items that are left run in it, in which packs, on how many ranks each.

Items come largest first. Each goes to the open pack with the least memory left that still holds it and stays under the makespan; else it opens a pack on the
fewest ranks that meet the makespan, if so many are left; else it waits for another micro-batch. Ranks are handed out fastest first, so the slowest ranks get
the last (smallest) packs, and are asked for no more than they can do. O(items x (log packs + shift)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.compiled import compiled, inner
from dhp_ray.planner.items import Items, Machine


class MicroBatch(NamedTuple):
    """`pack[i]` is the pack of `rest[i]`, -1 if it waits.

    Pack p runs on `degree[p]` ranks, from place `first[p]` of the ranks by speed, for `time[p]` seconds. `value`: the sum over what is served.
    """

    pack: np.ndarray
    degree: np.ndarray
    first: np.ndarray
    time: np.ndarray
    value: float
    complete: bool


@inner
def _time(language: float, attention: float, vision: float, image: float, tokens: float, degree: int, speed: float, machine: Machine) -> float:
    tables = machine.tables
    crosses = 1 if degree > machine.ranks_per_node else 0
    exposed = tables.transfer_s[crosses, degree] * tokens - tables.hidden[degree] * attention / speed
    return (language / degree + max(vision / degree, image)) / speed + max(0.0, exposed) + tables.latency_s[degree] + tables.pack_s


@compiled
def fill_micro_batch(items: Items, rest: np.ndarray, value: np.ndarray, makespan: float, machine: Machine, pace: np.ndarray, all_or_none: bool) -> MicroBatch:
    """`rest`: items, largest first; `value`: what serving each is worth; `pace`: speeds of the ranks, fastest first. Stops early if not all fit but must."""
    num_ranks, capacity = len(pace), machine.tokens_per_rank
    pack = np.full(len(rest), -1)
    limit = min(num_ranks, len(rest))
    degree, first, time = np.zeros(limit, dtype=np.int64), np.zeros(limit, dtype=np.int64), np.zeros(limit)
    language, attention, vision, image, tokens = np.zeros(limit), np.zeros(limit), np.zeros(limit), np.zeros(limit), np.zeros(limit, dtype=np.int64)
    room, order = np.zeros(limit, dtype=np.int64), np.zeros(limit, dtype=np.int64)  # memory left of the open packs, ascending
    count, used, served, complete = 0, 0, 0.0, True
    for place in range(len(rest)):
        item = rest[place]
        need = items.tokens[item]
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if room[middle] < need:
                low = middle + 1
            else:
                high = middle
        into, spent = -1, 0.0
        for found in range(low, count):
            candidate = order[found]
            spent = _time(language[candidate] + items.language_s[item], attention[candidate] + items.attention_s[item],
                          vision[candidate] + items.vision_s[item], max(image[candidate], items.image_s[item]), float(tokens[candidate] + need),
                          degree[candidate], pace[first[candidate] + degree[candidate] - 1], machine)
            if spent <= makespan:
                into, low = candidate, found
                break
        if into < 0:
            ranks = items.minimum_degree[item]
            while used + ranks <= num_ranks:
                spent = _time(items.language_s[item], items.attention_s[item], items.vision_s[item], items.image_s[item], float(need), ranks,
                              pace[used + ranks - 1], machine)
                if spent <= makespan:
                    break
                ranks += 1
            if used + ranks > num_ranks:
                complete = False
                if all_or_none:
                    break
                continue
            into = count
            degree[into], first[into] = ranks, used
            used += ranks
            left = ranks * capacity - need
            low = count
            count += 1
        else:
            left = room[low] - need
        pack[place] = into
        served += value[item]
        language[into] += items.language_s[item]
        attention[into] += items.attention_s[item]
        vision[into] += items.vision_s[item]
        image[into] = max(image[into], items.image_s[item])
        tokens[into] += need
        time[into] = spent
        while low > 0 and room[low - 1] > left:
            room[low], order[low] = room[low - 1], order[low - 1]
            low -= 1
        room[low], order[low] = left, into
    return MicroBatch(pack, degree[:count], first[:count], time[:count], served, complete)
