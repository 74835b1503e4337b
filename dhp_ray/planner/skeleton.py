"""Places the items that need several ranks (and any other large ones) under a makespan T: the skeleton of a `sync=step` plan.

Items come largest first. For each, every degree from the fewest ranks that meet T up to a whole node (beyond a node: up to whole nodes) is tried on every
*window*: ranks of one node (several whole nodes) next to each other in the order in which they get free. A window of d ranks that get free at f_1 <= ... <= f_d
starts the item at f_d, so its waste is

    gap_weight * sum (f_d - f_i) * v_i    idle time before it: small items may fill it later
    + t(d) * sum v_i - compute            communication, and ranks held to the slowest one's speed

and the least waste wins, then the latest start (best fit). Sets of ranks that exist (in the pool, or earlier in this plan) may waste `reuse_s` more.

    node 0   rank 0  |--a--|--b---|         rank 2 waits for rank 1: the gap is kept as a hole for small items
             rank 1  |--a--|--c-|
             rank 2  |-d-|..|--c-|

O(items x degrees x ranks) at worst; nodes that are still untouched are looked at once. Memory O(ranks + sum of degrees).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.compiled import compiled
from dhp_ray.planner.items import Items, Machine, least_degree, time_s

MAX_GROUPS_PER_RANK = 16
"""Different groups of several ranks that one rank meets in a step, at most (a group of all ranks does not count)."""


class Sets(NamedTuple):
    """Sets of ranks that may be used again: set i is ranks[first[i]:first[i + 1]], ascending."""

    ranks: np.ndarray
    first: np.ndarray


class Skeleton(NamedTuple):
    """Group g runs item[g] on ranks[first[g]:first[g + 1]] from start[g]; `degree0[i]` is the least degree of item i, `count` the number of groups.

    Gaps: hole h is rank hole_rank[h], from hole_start[h] for hole_length[h] seconds. `free`: when each rank is free at the end.
    """

    placed: bool
    item: np.ndarray
    first: np.ndarray
    ranks: np.ndarray
    start: np.ndarray
    hole_rank: np.ndarray
    hole_start: np.ndarray
    hole_length: np.ndarray
    free: np.ndarray


@compiled
def _highest_degree(degree: int, machine: Machine) -> int:
    num_ranks, node = len(machine.speeds), machine.ranks_per_node
    return min(num_ranks, max((degree + node - 1) // node * node, degree + 2))


@compiled
def place_skeleton(items: Items, order: np.ndarray, smallest_s: float, makespan: float, machine: Machine, busy: np.ndarray, pool: Sets, gap_weight: float,
                   prefer_late: float, reuse_s: float) -> Skeleton:
    """Place the items of `order` that take longer than `smallest_s` on one rank, on ranks that are busy until `busy`.

    `placed` is False if one of them finds no room under `makespan`.
    """
    num_ranks, node_size, speeds, tables = len(machine.speeds), machine.ranks_per_node, machine.speeds, machine.tables
    num_nodes = (num_ranks + node_size - 1) // node_size
    degrees = np.zeros(len(order), dtype=np.int64)
    count, total = 0, 0
    for place in range(len(order)):
        item = order[place]
        single = items.minimum_degree[item] == 1 and time_s(items, item, 1, 0, 1.0, tables) <= smallest_s
        if not single:
            degrees[place] = least_degree(items, item, makespan, machine)
            if degrees[place] == 0:
                return _nowhere()
            count += 1
            total += _highest_degree(degrees[place], machine)
    group_item, group_start = np.zeros(count, dtype=np.int64), np.zeros(count)
    first, ranks = np.zeros(count + 1, dtype=np.int64), np.zeros(total, dtype=np.int64)
    hole_rank, hole_start, hole_length = np.zeros(total, dtype=np.int64), np.zeros(total), np.zeros(total)
    num_holes, group = 0, 0
    free = busy.copy()
    met = np.zeros(num_ranks, dtype=np.int64)
    by_free = np.argsort(-speeds, kind="mergesort")  # ranks of a node, in the order in which they get free
    by_free = by_free[np.argsort(by_free // node_size, kind="mergesort")]
    node_order, node_free = np.arange(num_nodes), np.zeros(num_nodes)
    _resort(0, num_nodes - 1, free, by_free, node_order, node_free, node_size)
    set_first = np.zeros(len(pool.first) + count, dtype=np.int64)
    set_ranks = np.zeros(len(pool.ranks) + total, dtype=np.int64)
    set_first[:len(pool.first)] = pool.first
    set_ranks[:len(pool.ranks)] = pool.ranks
    num_sets = len(pool.first) - 1
    chosen = np.zeros(num_ranks, dtype=np.int64)
    for place in range(len(order)):
        if degrees[place] == 0:
            continue
        item, lowest = order[place], degrees[place]
        highest = _highest_degree(lowest, machine)
        compute = items.language_s[item] + items.vision_s[item]
        best, best_place, best_degree, best_start = np.inf, -1, 0, 0.0
        for degree in range(lowest, highest + 1):
            if degree <= node_size:
                nominal = time_s(items, item, degree, 0, 1.0, tables)
                if machine.uniform and (nominal > makespan or nominal * degree - compute - prefer_late * best_start >= best - 1e-12):
                    continue
                seen_untouched = False
                for node in range(num_nodes):
                    begin, end = node * node_size, min((node + 1) * node_size, num_ranks)
                    if end - begin < degree:
                        continue
                    if machine.uniform:
                        if free[by_free[begin + degree - 1]] + nominal > makespan:
                            continue
                        if free[by_free[end - 1]] == 0.0:
                            if seen_untouched:
                                continue
                            seen_untouched = end - begin == node_size
                    for last in range(begin + degree - 1, end):
                        start = free[by_free[last]]
                        if machine.uniform and last + 1 < end and free[by_free[last + 1]] == start:
                            continue  # the next window starts as early and waits less
                        if start + nominal > makespan and machine.uniform:
                            break
                        waste, slowest, speed_sum = 0.0, np.inf, 0.0
                        for index in range(last - degree + 1, last + 1):
                            rank = by_free[index]
                            waste += (start - free[rank]) * speeds[rank]
                            slowest = min(slowest, speeds[rank])
                            speed_sum += speeds[rank]
                        time = nominal if machine.uniform else time_s(items, item, degree, 0, slowest, tables)
                        if start + time > makespan:
                            continue
                        cost = gap_weight * waste + time * speed_sum - compute - prefer_late * start
                        if cost < best - 1e-12:
                            best, best_place, best_degree, best_start = cost, last, degree, start
            else:
                found, start, cost, place_in_order = _across_nodes(items, item, degree, makespan, machine, free, by_free, node_order, node_free, gap_weight,
                                                                   prefer_late)
                if found and cost < best - 1e-12:
                    best, best_place, best_degree, best_start = cost, place_in_order, degree, start
        anywhere = best_place < 0
        if anywhere:
            everywhere = np.argsort(free, kind="mergesort")
            for degree in range(lowest, highest + 1):
                found, start, cost, last = _any_ranks(items, item, degree, makespan, machine, free, everywhere, gap_weight, prefer_late)
                if found and cost < best - 1e-12:
                    best, best_place, best_degree, best_start = cost, last, degree, start
        best_set = -1
        limit = best + reuse_s
        for index in range(num_sets):
            degree = set_first[index + 1] - set_first[index]
            if degree < lowest or degree > highest:
                continue
            waste, slowest, speed_sum, start = 0.0, np.inf, 0.0, 0.0
            low_node, high_node = num_nodes, -1
            for position in range(set_first[index], set_first[index + 1]):
                rank = set_ranks[position]
                start = max(start, free[rank])
                slowest = min(slowest, speeds[rank])
                low_node, high_node = min(low_node, rank // node_size), max(high_node, rank // node_size)
            if start > makespan:
                continue
            time = time_s(items, item, degree, 1 if high_node > low_node else 0, slowest, tables)
            if start + time > makespan:
                continue
            for position in range(set_first[index], set_first[index + 1]):
                rank = set_ranks[position]
                waste += (start - free[rank]) * speeds[rank]
                speed_sum += speeds[rank]
            cost = gap_weight * waste + time * speed_sum - compute - prefer_late * start
            if cost <= limit:
                limit, best_set, best_degree, best_start = cost, index, degree, start
        if best_set >= 0:
            for index in range(best_degree):
                chosen[index] = set_ranks[set_first[best_set] + index]
        elif best_place >= 0:
            if anywhere:
                for index in range(best_degree):
                    chosen[index] = everywhere[best_place - best_degree + 1 + index]
            elif best_degree <= node_size:
                for index in range(best_degree):
                    chosen[index] = by_free[best_place - best_degree + 1 + index]
            else:
                _take_nodes(best_place, best_degree, node_order, by_free, node_size, num_ranks, chosen)
            if 1 < best_degree < num_ranks:
                for index in range(best_degree):
                    if met[chosen[index]] >= MAX_GROUPS_PER_RANK:
                        return _nowhere()
                    met[chosen[index]] += 1
            chosen[:best_degree].sort()
            if best_degree > 1:
                for index in range(best_degree):
                    set_ranks[set_first[num_sets] + index] = chosen[index]
                set_first[num_sets + 1] = set_first[num_sets] + best_degree
                num_sets += 1
        else:
            return _nowhere()
        slowest = np.inf
        low_node, high_node = num_nodes, -1
        for index in range(best_degree):
            slowest = min(slowest, speeds[chosen[index]])
            low_node, high_node = min(low_node, chosen[index] // node_size), max(high_node, chosen[index] // node_size)
        finish = best_start + time_s(items, item, best_degree, 1 if high_node > low_node else 0, slowest, tables)
        for index in range(best_degree):
            rank = chosen[index]
            if free[rank] < best_start:
                hole_rank[num_holes], hole_start[num_holes], hole_length[num_holes] = rank, free[rank], best_start - free[rank]
                num_holes += 1
            free[rank] = finish
            ranks[first[group] + index] = rank
        group_item[group], group_start[group] = item, best_start
        first[group + 1] = first[group] + best_degree
        group += 1
        _resort(low_node, high_node, free, by_free, node_order, node_free, node_size)
    return Skeleton(True, group_item, first, ranks[:first[group]], group_start, hole_rank[:num_holes], hole_start[:num_holes], hole_length[:num_holes], free)


@compiled
def _nowhere() -> Skeleton:
    none, nothing = np.zeros(0, dtype=np.int64), np.zeros(0)
    return Skeleton(False, none, none, none, nothing, none, nothing, nothing, nothing)


@compiled
def _resort(low_node: int, high_node: int, free: np.ndarray, by_free: np.ndarray, node_order: np.ndarray, node_free: np.ndarray, node_size: int) -> None:
    """Bring the touched nodes' ranks, and the nodes (by their last rank), back into the order in which they get free."""
    num_ranks, num_nodes = len(free), len(node_order)
    for node in range(low_node, high_node + 1):
        begin, end = node * node_size, min((node + 1) * node_size, num_ranks)
        for index in range(begin + 1, end):
            rank, move = by_free[index], index
            while move > begin and free[by_free[move - 1]] > free[rank]:
                by_free[move] = by_free[move - 1]
                move -= 1
            by_free[move] = rank
        node_free[node] = free[by_free[end - 1]]
    for index in range(1, num_nodes):
        node, move = node_order[index], index
        while move > 0 and node_free[node_order[move - 1]] > node_free[node]:
            node_order[move] = node_order[move - 1]
            move -= 1
        node_order[move] = node


@compiled
def _across_nodes(items: Items, item: int, degree: int, makespan: float, machine: Machine, free: np.ndarray, by_free: np.ndarray, node_order: np.ndarray,
                  node_free: np.ndarray, gap_weight: float, prefer_late: float) -> tuple[bool, float, float, int]:
    """The best window of whole nodes (of the last one only the ranks that get free first): found, start, cost, first place in `node_order`."""
    num_ranks, num_nodes, node_size, speeds = len(free), len(node_order), machine.ranks_per_node, machine.speeds
    found, best, best_start, best_place = False, np.inf, 0.0, -1
    nominal = time_s(items, item, degree, 1, 1.0, machine.tables)
    compute = items.language_s[item] + items.vision_s[item]
    if machine.uniform and nominal > makespan:
        return False, 0.0, 0.0, -1
    for place in range(num_nodes):
        if place + 1 < num_nodes and machine.uniform and node_free[node_order[place]] == 0.0 and place > 0:
            continue  # untouched nodes are alike
        start, left, last = 0.0, degree, place
        while left > 0 and last < num_nodes:
            node = node_order[last]
            begin, end = node * node_size, min((node + 1) * node_size, num_ranks)
            take = min(left, end - begin)
            start = max(start, free[by_free[begin + take - 1]])
            left -= take
            last += 1
        if left > 0 or (start + nominal > makespan and machine.uniform):
            break
        waste, slowest, speed_sum, left = 0.0, np.inf, 0.0, degree
        for index in range(place, last):
            node = node_order[index]
            begin, end = node * node_size, min((node + 1) * node_size, num_ranks)
            take = min(left, end - begin)
            for position in range(begin, begin + take):
                rank = by_free[position]
                waste += (start - free[rank]) * speeds[rank]
                slowest = min(slowest, speeds[rank])
                speed_sum += speeds[rank]
            left -= take
        time = nominal if machine.uniform else time_s(items, item, degree, 1, slowest, machine.tables)
        if start + time > makespan:
            continue
        cost = gap_weight * waste + time * speed_sum - compute - prefer_late * start
        if cost < best - 1e-12:
            found, best, best_start, best_place = True, cost, start, place
    return found, best_start, best, best_place


@compiled
def _any_ranks(items: Items, item: int, degree: int, makespan: float, machine: Machine, free: np.ndarray, order: np.ndarray, gap_weight: float,
               prefer_late: float) -> tuple[bool, float, float, int]:
    """The best window of ranks wherever they are, the last resort: found, start, cost, last place in `order`."""
    speeds = machine.speeds
    found, best, best_start, best_last = False, np.inf, 0.0, -1
    nominal = time_s(items, item, degree, 1, 1.0, machine.tables)
    compute = items.language_s[item] + items.vision_s[item]
    for last in range(degree - 1, len(order)):
        start = free[order[last]]
        if machine.uniform and start + nominal > makespan:
            break
        if machine.uniform and last + 1 < len(order) and free[order[last + 1]] == start:
            continue
        waste, slowest, speed_sum = 0.0, np.inf, 0.0
        for index in range(last - degree + 1, last + 1):
            rank = order[index]
            waste += (start - free[rank]) * speeds[rank]
            slowest = min(slowest, speeds[rank])
            speed_sum += speeds[rank]
        time = time_s(items, item, degree, 1, slowest, machine.tables)
        cost = gap_weight * waste + time * speed_sum - compute - prefer_late * start
        if start + time <= makespan and cost < best - 1e-12:
            found, best, best_start, best_last = True, cost, start, last
    return found, best_start, best, best_last


@compiled
def _take_nodes(place: int, degree: int, node_order: np.ndarray, by_free: np.ndarray, node_size: int, num_ranks: int, chosen: np.ndarray) -> None:
    count = 0
    while count < degree:
        node = node_order[place]
        begin, end = node * node_size, min((node + 1) * node_size, num_ranks)
        for position in range(begin, min(end, begin + degree - count)):
            chosen[count] = by_free[position]
            count += 1
        place += 1
