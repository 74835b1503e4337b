"""Candidate sets of ranks for an item, given the time until which each rank is busy.

A candidate is a set of d ranks that are neighbours in the order in which they become free, f_1 <= ... <= f_d. It starts
an item at f_d. With speeds v its waste is

    gap_weight * sum (f_d - f_i) * v_i    idle time before the item, which small items may fill later
    + t(d) * sum v_i - compute            communication, and ranks that wait for the slowest one
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Item, Machine, encode_s_of, time_s
from dhp_ray.planner.primitives.compiled import inner
from dhp_ray.planner.primitives.sorting import ascending, insertion_sort
from dhp_ray.planner.step.free_ranks import FreeRanks
from dhp_ray.planner.step.rank_lists import RankLists

EVEN = 1e-12
"""A candidate must be better by more than this many seconds to count as better."""

ROUNDING = 1e-12
"""The share by which two ways to compute a time may differ."""


class Candidate(NamedTuple):
    """The best candidate so far; degree 0 if there is none. Its ranks are stored separately."""

    cost: float
    degree: int
    start: float


@inner
def best_candidate(
    item: Item,
    lowest: int,
    highest: int,
    makespan: float,
    machine: Machine,
    lists: RankLists,
    ranks: FreeRanks,
    gap_weight: float,
    chosen: np.ndarray,
) -> Candidate:
    """The candidate with the least waste on `lowest` to `highest` ranks; its ranks are written to `chosen`.

    With equal speeds: inside nodes, and whole nodes; anywhere only if there is no such candidate. With unequal speeds:
    inside nodes, and anywhere if a node is too small or has no candidate, on neighbours in a list of ranks of similar
    speed (`rank_lists`).
    """
    best = Candidate(np.inf, 0, 0.0)
    if not machine.uniform:
        best = _in_lists(item, lowest, highest, False, makespan, machine, lists, ranks, gap_weight, best, chosen)
        if best.degree == 0 or highest > machine.ranks_per_node:
            best = _in_lists(item, lowest, highest, True, makespan, machine, lists, ranks, gap_weight, best, chosen)
        return best
    compute = item.language_s + item.vision_s
    for degree in range(lowest, highest + 1):
        crosses = degree > machine.ranks_per_node
        time = time_s(item, degree, crosses, 1.0, machine.rates[degree])
        extra = time * degree - compute
        if extra >= best.cost - EVEN or time > makespan:
            continue
        if crosses:
            best = _whole_nodes(degree, time, extra, makespan, machine, ranks, gap_weight, best, chosen)
        else:
            for begin, end in zip(machine.first[:-1], machine.first[1:]):
                if end - begin >= degree and ranks.free[ranks.by_free[begin + degree - 1]] + time <= makespan:
                    best = _neighbours(
                        degree, time, compute, makespan, machine.speeds, ranks.free, ranks.by_free, begin, end,
                        -1, gap_weight, best, chosen,
                    )
                    if best.cost <= extra + EVEN:  # it has no idle time
                        break
    if best.degree == 0:
        everywhere = ascending(ranks.free)
        for degree in range(lowest, highest + 1):
            time = time_s(item, degree, True, 1.0, machine.rates[degree])
            best = _neighbours(
                degree, time, compute, makespan, machine.speeds, ranks.free, everywhere, 0, len(everywhere), -1,
                gap_weight, best, chosen,
            )
    return best


@inner
def _whole_nodes(
    degree: int,
    time: float,
    extra: float,
    makespan: float,
    machine: Machine,
    ranks: FreeRanks,
    gap_weight: float,
    best: Candidate,
    chosen: np.ndarray,
) -> Candidate:
    """Candidates of whole nodes at equal speeds; of the last node only the ranks that become free first. O(nodes x
    nodes of a candidate).
    """
    free, by_free, nodes, first = ranks.free, ranks.by_free, ranks.nodes, machine.first
    tried = np.zeros(degree, dtype=np.int64)
    for place in range(len(nodes)):
        start, total, taken, last = 0.0, 0.0, 0, place
        while taken < degree and last < len(nodes):
            for position in range(first[nodes[last]], min(first[nodes[last] + 1], first[nodes[last]] + degree - taken)):
                tried[taken] = by_free[position]
                start = max(start, free[tried[taken]])
                total += free[tried[taken]]
                taken += 1
            last += 1
        if taken < degree or start + time > makespan:
            break
        cost = extra + gap_weight * (degree * start - total)
        if cost < best.cost - EVEN:
            best = Candidate(cost, degree, start)
            chosen[:degree] = tried
            if cost <= extra + EVEN:
                break
    return best


@inner
def _in_lists(
    item: Item,
    lowest: int,
    highest: int,
    crosses: bool,
    makespan: float,
    machine: Machine,
    lists: RankLists,
    ranks: FreeRanks,
    gap_weight: float,
    best: Candidate,
    chosen: np.ndarray,
) -> Candidate:
    """Candidates in the lists inside nodes (or across). For each degree the most even list comes first; ends at the
    first list that cannot waste less than the best candidate.
    """
    compute, speeds, rates = item.language_s + item.vision_s, machine.speeds, machine.rates
    first, heads, by_degree, stretch, speed = lists.first, lists.head, lists.by_degree, lists.stretch, lists.speed
    free, listed, is_sorted, following, earliest, least_s = (
        ranks.free,
        ranks.listed,
        ranks.sorted,
        ranks.following,
        ranks.earliest,
        ranks.least_s,
    )  # read in the loop, they would be reference-counted
    for degree in range(lowest, highest + 1):
        if time_s(item, degree, crosses, machine.fastest, rates[degree]) > makespan:
            continue
        # the part of the area that grows with the stretch
        scaled = item.language_s + degree * encode_s_of(item, degree)
        if item.image_s > 0.0:
            scaled += degree * rates[degree].encoder_pass_s
        least = time_s(item, degree, crosses, machine.slowest, rates[degree]) * machine.slowest * degree - compute
        transfer = item.tokens * (rates[degree].across_s if crosses else rates[degree].inside_s)
        hidden = rates[degree].overlap * item.attention_s
        kind = 2 * degree + int(crosses)
        before, end = len(by_degree) + kind, lists.begin[kind + 1]
        place = following[before]
        while place < end and least + scaled * (stretch[place] - 1.0) < best.cost - EVEN:
            index, after, slowest = by_degree[place], following[place], speed[place]
            # a bound of the area without `time_s`: it rules out most lists, by waste without idle time or by their end
            exposed = max(0.0, transfer * slowest - hidden) + rates[degree].overhead_s * slowest
            area, room_s = scaled + degree * exposed, makespan * (1.0 + ROUNDING) - earliest[place]
            if stretch[place] * area - compute >= best.cost or area > room_s * degree * slowest:
                before, place = place, after
                continue
            begin, stop, head = first[index], first[index + 1], heads[index]
            if not is_sorted[index]:
                insertion_sort(listed, begin, stop, free)
                is_sorted[index] = True
            earliest[place] = start = free[listed[begin + degree - 1]]
            if start + least_s[degree] > makespan:
                following[before] = place = after
                continue
            time = time_s(item, degree, crosses, slowest, rates[degree])
            if head >= 0:
                earliest[place] = start = max(start, free[head])
            wasted = time * slowest * degree * stretch[place] - compute  # `time_s` may be above the bound
            if start + time <= makespan and wasted < best.cost - EVEN:
                best = _neighbours(
                    degree, time, compute, makespan, speeds, free, listed, begin, stop, head, gap_weight, best, chosen
                )
            before, place = place, after
    return best


@inner
def _neighbours(
    degree: int,
    time: float,
    compute: float,
    makespan: float,
    speeds: np.ndarray,
    free: np.ndarray,
    order: np.ndarray,
    begin: int,
    end: int,
    head: int,
    gap_weight: float,
    best: Candidate,
    chosen: np.ndarray,
) -> Candidate:
    """Candidates among order[begin:end], ranks sorted by the time at which they become free, for an item that takes
    `time` on any of them. Only candidates with rank `head`, unless it is -1. O(ranks).
    """
    idle, speed_sum = 0.0, 0.0  # of the candidate: sums of free * speed and of speed
    head_at = -1  # its place in `order`, once it is met
    for last in range(begin, end):
        rank = order[last]
        start = free[rank]
        if start + time > makespan or (head_at >= 0 and head_at <= last - degree):
            break
        if rank == head:
            head_at = last
        idle += start * speeds[rank]
        speed_sum += speeds[rank]
        if last >= begin + degree:
            idle -= free[order[last - degree]] * speeds[order[last - degree]]
            speed_sum -= speeds[order[last - degree]]
        if last >= begin + degree - 1 and (head_at >= 0 or head < 0):
            cost = gap_weight * (start * speed_sum - idle) + time * speed_sum - compute
            if cost < best.cost - EVEN:
                best = Candidate(cost, degree, start)
                chosen[:degree] = order[last - degree + 1 : last + 1]
    return best
