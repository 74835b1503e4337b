"""The published planner (DHP, arXiv 2602.21788): makes packs by memory, then sets the degrees of the packs, one
micro-batch at a time.

1. Best-fit decreasing packs the sequences (`packing`).
2. Each pack, longest first, goes into the first micro-batch that has enough ranks left for its minimum degree.
3. In each micro-batch the ranks are divided among the packs so that the slowest pack is as fast as possible. The paper
   fills a table DP[i][j] in O(K N^2). The problem is a separable bottleneck, so a search on the makespan M finds the
   same optimum: pack i needs the least d with T_i(d) <= M, and M is feasible if these d sum to at most N. Some 40
   trials, each O(K) if compute dominates.

With `sync=step` the same packs run in the same order without a barrier, each on the ranks that are free first. Speeds
are ignored, as in the paper. The tokens that a rank takes are tuned (`pack_cap`): either only for the packs, or also
for the minimum degrees (the paper's E).
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.baselines.pack_cap import capacities, degrees_at, tuned
from dhp_ray.planner.primitives.best_fit import Packs, best_fit_decreasing
from dhp_ray.planner.primitives.bisection import halve
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.list_schedule import run_next
from dhp_ray.planner.primitives.sorting import ascending
from dhp_ray.planner.problem import Item, Items, Machine, Problem, least_degree, packed, time_s
from dhp_ray.planner.schedule import Schedule, by_owner, firsts_of, gathered


def dhp_paper(problem: Problem) -> Schedule:
    return tuned(problem, paper_at)


def paper_at(problem: Problem, pack_cap: int, degree_cap: int) -> Schedule:
    """The published planner with packs of at most `pack_cap` tokens a rank and minimum degrees from `degree_cap`."""
    cluster, tokens = problem.cluster, problem.items.tokens
    packs = best_fit_decreasing(tokens, capacities(tokens, degrees_at(tokens, degree_cap, cluster.num_ranks), pack_cap))
    items = packed(problem, packs)
    degrees = degrees_at(items.tokens, degree_cap, cluster.num_ranks)
    items.minimum_degree = degrees
    return dealt(problem, packs, items, first_fit(degrees, cluster.num_ranks)[0])


def dealt(problem: Problem, packs: Packs, items: Items, micro_batch: np.ndarray, powers: bool = False) -> Schedule:
    """The schedule of packs (`items`) in these micro-batches, with degrees that make the slowest pack of each
    micro-batch as fast as possible. `powers`: degrees are powers of two (or all ranks), larger ones first, so that a
    group of d ranks starts at a multiple of d.
    """
    members, first = by_owner(micro_batch, int(micro_batch.max()) + 1)
    by_micro_batch = problem.sync == "micro_batch"
    order, degree, ranks = _deal(items, problem.nominal_machine, members, first, by_micro_batch, powers)
    rows, first_row = gathered(packs.rows, packs.first, order)
    return Schedule(rows, first_row, ranks[: degree.sum()], firsts_of(degree), micro_batch[order] * int(by_micro_batch))


@compiled
def first_fit(need: np.ndarray, num_ranks: int) -> tuple[np.ndarray, int]:
    """(for each pack, the first micro-batch with enough ranks left; number of micro-batches). O(packs x
    micro-batches).
    """
    micro_batch, used, count = np.zeros(len(need), dtype=np.int64), np.zeros(len(need), dtype=np.int64), 0
    for pack in range(len(need)):
        index = 0
        while used[index] + need[pack] > num_ranks:
            index += 1
        used[index] += need[pack]
        micro_batch[pack] = index
        count = max(count, index + 1)
    return micro_batch, count


@compiled
def _deal(
    items: Items, machine: Machine, members: np.ndarray, first: np.ndarray, by_micro_batch: bool, powers: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(packs in order of execution, the degree of each, their ranks one pack after another). The packs of micro-batch m
    are `members[first[m]:first[m + 1]]`.
    """
    num_ranks = len(machine.speeds)
    order, degree = np.zeros(len(members), dtype=np.int64), np.zeros(len(members), dtype=np.int64)
    ranks, dealt, free = np.zeros(num_ranks * (len(first) - 1), dtype=np.int64), 0, np.zeros(num_ranks)
    for micro_batch in range(len(first) - 1):
        begin, end = first[micro_batch], first[micro_batch + 1]
        degrees = allocate(items, members[begin:end], machine, powers)
        seconds = np.zeros(end - begin)
        for place in range(end - begin):
            seconds[place] = _time(items[members[begin + place]], degrees[place], machine)
        ready, taken = np.arange(num_ranks) if by_micro_batch else ascending(free), 0
        for index, place in enumerate(ascending(-1.0 * degrees if powers else -seconds)):
            chosen = ready[taken : taken + degrees[place]]
            chosen = chosen[ascending(chosen.astype(np.float64))]
            ranks[dealt : dealt + len(chosen)] = chosen
            run_next(chosen, seconds[place], free)
            order[begin + index], degree[begin + index] = members[begin + place], len(chosen)
            taken += len(chosen)
            dealt += len(chosen)
    return order, degree, ranks


@inner
def allocate(items: Items, members: np.ndarray, machine: Machine, powers: bool) -> np.ndarray:
    """The degrees of the packs of a micro-batch that make the slowest pack as fast as possible. The minimum degrees of
    the packs must sum to at most N.
    """
    span = np.zeros(3)
    for item in members:
        span[1] = max(span[1], _time(items[item], items[item].minimum_degree, machine))
    while halve(span, 1e-6):
        span[int(_needed(items, members, span[2], machine, powers)[1])] = span[2]
    return _needed(items, members, span[1], machine, powers)[0]


@inner
def _needed(
    items: Items, members: np.ndarray, makespan: float, machine: Machine, powers: bool
) -> tuple[np.ndarray, bool]:
    """(the least degrees that meet a makespan, whether there are enough ranks for them)"""
    degrees, total = np.zeros(len(members), dtype=np.int64), 0
    num_ranks, node_size, rates = len(machine.speeds), machine.ranks_per_node, machine.rates
    for place in range(len(members)):
        item = items[members[place]]
        degrees[place] = least_degree(item, makespan, 1.0, node_size, rates, num_ranks - total)
        if powers:
            degrees[place] = _least_power(item, degrees[place], makespan, num_ranks - total, machine)
        if degrees[place] == 0:
            return degrees, False
        total += degrees[place]
    return degrees, True


@inner
def _least_power(item: Item, degree: int, makespan: float, most: int, machine: Machine) -> int:
    """The least power of two from `degree` on (or all ranks) that meets a makespan, if it is at most `most`; otherwise
    0.
    """
    power, num_ranks = 1, len(machine.speeds)
    while power < degree or (power <= most and _time(item, power, machine) > makespan):
        power = min(2 * power, num_ranks) if power < num_ranks else num_ranks + 1
    return power if degree > 0 and power <= most else 0


@inner
def _time(item: Item, degree: int, machine: Machine) -> float:
    return time_s(item, degree, degree > machine.ranks_per_node, 1.0, machine.rates[degree])
