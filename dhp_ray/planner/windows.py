"""Windows: where an item can go among ranks that are busy until some time each.

A window is a set of d ranks next to each other in the order in which they get free, f_1 <= ... <= f_d; it starts an item at f_d. With speeds v its waste is

    gap_weight * sum (f_d - f_i) * v_i    idle time before it: small items may fill it later
    + t(d) * sum v_i - compute            communication, and ranks held to the pace of the slowest
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.compiled import inner
from dhp_ray.planner.items import Item, Machine, time_s
from dhp_ray.planner.sorting import ascending

SPEEDS = 16
"""In a cluster of unequal speeds, windows across nodes are searched among the ranks not slower than each of so many speeds."""

EVEN = 1e-12
"""Seconds by which a window must be better to count as better."""


class Ranks(NamedTuple):
    """When each rank is free; `by_free` holds each node's ranks in the order in which they get free, node after node; so does `nodes` the nodes, by
    their last rank's time (`node_free`). `by_speed`: all ranks, fastest first."""

    free: np.ndarray
    by_speed: np.ndarray
    by_free: np.ndarray
    nodes: np.ndarray
    node_free: np.ndarray


class Window(NamedTuple):
    """The best window so far; degree 0 if there is none. Its ranks are kept beside it."""

    cost: float
    degree: int
    start: float


@inner
def ranks_of(busy: np.ndarray, machine: Machine) -> Ranks:
    """Ranks that are busy until `busy`; equally free ones fastest first."""
    num_nodes = len(machine.first) - 1
    by_speed = ascending(-machine.speeds)
    ranks = Ranks(busy.copy(), by_speed, by_speed[ascending(machine.node[by_speed].astype(np.float64))], np.arange(num_nodes), np.zeros(num_nodes))
    keep_sorted(ranks, 0, num_nodes - 1, machine.first)
    return ranks


@inner
def keep_sorted(ranks: Ranks, low_node: int, high_node: int, first: np.ndarray) -> None:
    """Bring the ranks of the nodes from `low_node` to `high_node`, and the nodes, back into the order in which they get free (insertion sort)."""
    free, by_free, nodes, node_free = ranks.free, ranks.by_free, ranks.nodes, ranks.node_free
    for node in range(low_node, high_node + 1):
        begin, end = first[node], first[node + 1]
        for index in range(begin + 1, end):
            rank, move = by_free[index], index
            while move > begin and free[by_free[move - 1]] > free[rank]:
                by_free[move] = by_free[move - 1]
                move -= 1
            by_free[move] = rank
        node_free[node] = free[by_free[end - 1]]
    for index in range(1, len(nodes)):
        node, move = nodes[index], index
        while move > 0 and node_free[nodes[move - 1]] > node_free[node]:
            nodes[move] = nodes[move - 1]
            move -= 1
        nodes[move] = node


@inner
def best_window(item: Item, lowest: int, highest: int, makespan: float, machine: Machine, ranks: Ranks, gap_weight: float,
                chosen: np.ndarray) -> Window:
    """The window with the least waste on `lowest` to `highest` ranks; its ranks are written to `chosen`.

    Equal speeds: inside nodes, and whole nodes; anywhere only if there is no such window. Unequal speeds: inside nodes, and anywhere if a node is too small
    or has none, among ranks that are fast enough.
    """
    best = Window(np.inf, 0, 0.0)
    if machine.uniform:
        for degree in range(lowest, highest + 1):
            crosses = degree > machine.ranks_per_node
            time = time_s(item, degree, crosses, 1.0, machine.rates[degree])
            extra = time * degree - item.language_s - item.vision_s
            if extra >= best.cost - EVEN or time > makespan:
                continue
            if crosses:
                best = _whole_nodes(degree, time, extra, makespan, machine, ranks, gap_weight, best, chosen)
            else:
                best = _in_nodes(degree, time, extra, makespan, machine, ranks, gap_weight, best, chosen)
        if best.degree:
            return best
    else:
        for index in range(len(ranks.nodes)):
            node = ranks.by_free[machine.first[index]:machine.first[index + 1]]
            for place in range(len(node)):
                slowest = machine.speeds[node[place]]
                if (machine.speeds[node[:place]] == slowest).any():
                    continue
                fast = node[machine.speeds[node] >= slowest]
                for degree in range(lowest, min(highest, len(fast)) + 1):
                    best = _among(item, degree, False, makespan, machine, ranks.free, fast, slowest, gap_weight, best, chosen)
        if best.degree and highest <= machine.ranks_per_node:
            return best
    everywhere = ranks.by_speed[ascending(ranks.free[ranks.by_speed])]
    count = 1 if machine.uniform else min(len(everywhere), SPEEDS)
    before = -1.0
    for index in range(count):
        slowest = machine.speeds[ranks.by_speed[len(everywhere) - 1 - index * len(everywhere) // count]]
        if slowest == before:
            continue
        before = slowest
        fast = everywhere[machine.speeds[everywhere] >= slowest]
        for degree in range(lowest, min(highest, len(fast)) + 1):
            best = _among(item, degree, True, makespan, machine, ranks.free, fast, slowest, gap_weight, best, chosen)
    return best


@inner
def _in_nodes(degree: int, time: float, extra: float, makespan: float, machine: Machine, ranks: Ranks, gap_weight: float, best: Window,
              chosen: np.ndarray) -> Window:
    """Windows inside one node, at equal speeds; the first that waits for nothing is taken. O(ranks)."""
    free, by_free = ranks.free, ranks.by_free
    for node in range(len(ranks.nodes)):
        begin, end = machine.first[node], machine.first[node + 1]
        if end - begin < degree or free[by_free[begin + degree - 1]] + time > makespan:
            continue
        total = 0.0
        for last in range(begin, end):
            start = free[by_free[last]]
            if start + time > makespan:
                break
            total += start
            if last >= begin + degree:
                total -= free[by_free[last - degree]]
            if last < begin + degree - 1:
                continue
            cost = extra + gap_weight * (degree * start - total)
            if cost < best.cost - EVEN:
                best = Window(cost, degree, start)
                chosen[:degree] = by_free[last - degree + 1:last + 1]
        if best.cost <= extra + EVEN:
            break
    return best


@inner
def _whole_nodes(degree: int, time: float, extra: float, makespan: float, machine: Machine, ranks: Ranks, gap_weight: float, best: Window,
                 chosen: np.ndarray) -> Window:
    """Windows of whole nodes (of the last one only the ranks that get free first), at equal speeds. O(nodes x nodes of a window)."""
    free, by_free, nodes, first = ranks.free, ranks.by_free, ranks.nodes, machine.first
    for place in range(len(nodes)):
        start, total, left, last = 0.0, 0.0, degree, place
        while left > 0 and last < len(nodes):
            begin = first[nodes[last]]
            take = min(left, first[nodes[last] + 1] - begin)
            for position in range(begin, begin + take):
                total += free[by_free[position]]
            start = max(start, free[by_free[begin + take - 1]])
            left -= take
            last += 1
        if left > 0 or start + time > makespan:
            break
        cost = extra + gap_weight * (degree * start - total)
        if cost < best.cost - EVEN:
            best = Window(cost, degree, start)
            count = 0
            for index in range(place, last):
                begin = first[nodes[index]]
                take = min(degree - count, first[nodes[index] + 1] - begin)
                chosen[count:count + take] = by_free[begin:begin + take]
                count += take
            if cost <= extra + EVEN:
                break
    return best


@inner
def _among(item: Item, degree: int, crosses: bool, makespan: float, machine: Machine, free: np.ndarray, order: np.ndarray, slowest: float,
           gap_weight: float, best: Window, chosen: np.ndarray) -> Window:
    """Windows of `order`, ranks as they get free, none slower than `slowest`. O(ranks)."""
    speeds = machine.speeds
    time = time_s(item, degree, crosses, slowest, machine.rates[degree])
    compute = item.language_s + item.vision_s
    idle, speed_sum = 0.0, 0.0  # of the window: sums of free * speed and of speed
    for last in range(len(order)):
        rank = order[last]
        start = free[rank]
        if start + time > makespan:
            break
        idle += start * speeds[rank]
        speed_sum += speeds[rank]
        if last >= degree:
            idle -= free[order[last - degree]] * speeds[order[last - degree]]
            speed_sum -= speeds[order[last - degree]]
        if last >= degree - 1:
            cost = gap_weight * (start * speed_sum - idle) + time * speed_sum - compute
            if cost < best.cost - EVEN:
                best = Window(cost, degree, start)
                chosen[:degree] = order[last - degree + 1:last + 1]
    return best
