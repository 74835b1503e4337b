"""Places the items that need several ranks (and any other large ones) under a makespan T: the partial schedule of a
`sync=step` plan.

Items are placed largest first. For each item, degrees from the fewest ranks that meet T upwards are tried on every
candidate set of ranks (`candidates`), and the candidate with the least waste wins. The highest degree is a whole node
(beyond a node: whole nodes), or two ranks more than the fewest (with unequal speeds: twice the fewest) if that is more.
Groups that exist already may waste a little more (`cached_groups`).

    node 0   rank 0  |--a--|--b---|         rank 2 waits for rank 1: the gap is kept for small items
             rank 1  |--a--|--c-|
             rank 2  |-d-|..|--c-|

O(items x degrees x ranks) at worst. Memory O(ranks + sum of degrees).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Items, Machine, least_degree, time_s
from dhp_ray.planner.primitives.compiled import inner
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.step.cached_groups import CachedGroups, best_cached_group
from dhp_ray.planner.step.candidates import Candidate, best_candidate
from dhp_ray.planner.step.free_ranks import free_ranks, occupy
from dhp_ray.planner.step.rank_lists import RankLists

MAX_GROUPS_PER_RANK = 16
"""The most new groups of several ranks that one rank joins in a step (a group of all ranks does not count). Beyond
that, existing groups are used.
"""

OWN_GROUPS = 256
"""The most groups of this plan that are remembered to be used again."""


class PartialSchedule(NamedTuple):
    """Group g runs item[g] on ranks[first[g]:first[g + 1]] from start[g]. `free`: when each rank becomes free at the
    end.

    Each of these ranks has a gap before its group, of length zero if the rank is busy until then. `gap_start`: when the
    gap of each entry of `ranks` begins.
    """

    placed: bool
    item: np.ndarray
    first: np.ndarray
    ranks: np.ndarray
    start: np.ndarray
    gap_start: np.ndarray
    free: np.ndarray


@inner
def place_large(
    items: Items,
    order: np.ndarray,
    smallest_s: float,
    makespan: float,
    machine: Machine,
    lists: RankLists,
    busy: np.ndarray,
    pool: CachedGroups,
    gap_weight: float,
    reuse_s: float,
) -> PartialSchedule:
    """Place the items of `order` that take longer than `smallest_s` on one rank, on ranks that are busy until `busy`.

    A group of `pool`, or one that this plan uses already, may waste `reuse_s` more than the best candidate. `placed` is
    False if an item finds no room under `makespan`.
    """
    lowest = _lowest_degrees(items, order, smallest_s, makespan, machine)
    nothing, none = np.zeros(0), np.zeros(0, dtype=np.int64)
    if len(lowest) < len(order):
        return PartialSchedule(False, none, none, none, nothing, nothing, nothing)
    total, count = 0, 0
    least_s = np.full(len(busy) + 1, np.inf)
    for place in range(len(order)):
        if lowest[place] > 0:
            highest = _highest_degree(lowest[place], machine)
            total += max(highest, _common_degree(lowest[place], machine))
            count += 1
            for degree in range(lowest[place], 0 if machine.uniform else highest + 1):
                least_s[degree] = min(
                    least_s[degree], time_s(items[order[place]], degree, False, machine.fastest, machine.rates[degree])
                )
    group_item, group_start, gap_start = np.zeros(count, dtype=np.int64), np.zeros(count), np.zeros(total)
    first, group_ranks = np.zeros(count + 1, dtype=np.int64), np.zeros(total, dtype=np.int64)
    cached = CachedGroups(  # the pool's, the group of all ranks, and room for those of this plan
        np.concatenate((pool.ranks, np.arange(len(busy)), np.zeros(total, dtype=np.int64))),
        np.concatenate((pool.first, np.full(count + 1, len(pool.ranks) + len(busy)))),
    )
    num_cached, group = len(pool.first), 0
    ranks = free_ranks(busy, least_s, machine, lists)
    met, chosen = np.zeros(len(busy), dtype=np.int64), np.zeros(len(busy), dtype=np.int64)
    for place in range(len(order)):
        if lowest[place] == 0:
            continue
        item, highest = items[order[place]], _highest_degree(lowest[place], machine)
        candidate = Candidate(np.inf, 0, 0.0)
        if reuse_s > 0.0:  # a new group of a common degree is more likely to be used again
            degree = _common_degree(lowest[place], machine)
            candidate = best_candidate(item, degree, degree, makespan, machine, lists, ranks, gap_weight, chosen)
        if candidate.degree == 0:
            candidate = best_candidate(
                item, lowest[place], highest, makespan, machine, lists, ranks, gap_weight, chosen
            )
        limit = candidate.cost + reuse_s
        if 1 < candidate.degree < len(busy) and met[chosen[: candidate.degree]].max() >= MAX_GROUPS_PER_RANK:
            candidate, highest, limit = Candidate(np.inf, 0, 0.0), len(busy), np.inf
        again = best_cached_group(
            item, lowest[place], highest, makespan, machine, ranks.free, cached, num_cached, gap_weight, limit, chosen
        )
        candidate = again if again.degree > 0 else candidate
        if candidate.degree == 0:
            return PartialSchedule(False, none, none, none, nothing, nothing, nothing)
        members = chosen[ascending(chosen[: candidate.degree].astype(np.float64))]
        if again.degree == 0 and 1 < candidate.degree < len(busy):
            for rank in members:
                met[rank] += 1
            if num_cached < len(pool.first) + OWN_GROUPS:
                cached.first[num_cached + 1] = cached.first[num_cached] + candidate.degree
                cached.ranks[cached.first[num_cached] : cached.first[num_cached + 1]] = members
                num_cached += 1
        slowest, crosses = machine.speeds[members].min(), machine.node[members[-1]] > machine.node[members[0]]
        finish = candidate.start + time_s(item, candidate.degree, crosses, slowest, machine.rates[candidate.degree])
        if first[group] + candidate.degree > len(group_ranks):
            group_ranks = np.concatenate((group_ranks, np.zeros(len(group_ranks) + len(busy), dtype=np.int64)))
            gap_start = np.concatenate((gap_start, np.zeros(len(gap_start) + len(busy))))
        gap_start[first[group] : first[group] + candidate.degree] = ranks.free[members]
        occupy(ranks, members, finish, machine, lists)
        group_item[group], group_start[group] = order[place], candidate.start
        first[group + 1] = first[group] + candidate.degree
        group_ranks[first[group] : first[group + 1]] = members
        group += 1
    end = first[group]
    return PartialSchedule(True, group_item, first, group_ranks[:end], group_start, gap_start[:end], ranks.free)


@inner
def _lowest_degrees(
    items: Items, order: np.ndarray, smallest_s: float, makespan: float, machine: Machine
) -> np.ndarray:
    """The fewest ranks that each item of `order` needs, 0 for small ones. Ends early if an item cannot meet the
    makespan.
    """
    lowest = np.zeros(len(order), dtype=np.int64)
    num_ranks, node_size, rates = len(machine.speeds), machine.ranks_per_node, machine.rates
    for place in range(len(order)):
        item = items[order[place]]
        several = item.minimum_degree > 1 or item.tokens > machine.tokens_per_rank
        if several or time_s(item, 1, False, 1.0, rates[1]) > smallest_s:
            lowest[place] = least_degree(item, makespan, machine.fastest, node_size, rates, num_ranks)
            if lowest[place] == 0:
                return lowest[:place]
    return lowest


@inner
def _common_degree(degree: int, machine: Machine) -> int:
    """The next power of two up to half a node; above that, the next number of whole nodes."""
    common = 1
    while common < degree:
        common *= 2
    if degree > machine.ranks_per_node // 2:
        common = (degree + machine.ranks_per_node - 1) // machine.ranks_per_node * machine.ranks_per_node
    return min(common, len(machine.speeds))


@inner
def _highest_degree(degree: int, machine: Machine) -> int:
    num_ranks, node_size = len(machine.speeds), machine.ranks_per_node
    more = degree + 2 if machine.uniform else 2 * degree  # the fewest ranks are those of the fastest speed
    return min(num_ranks, max((degree + node_size - 1) // node_size * node_size, more))
