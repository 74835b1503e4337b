"""Power-of-two degrees: each sequence gets the least power of two that holds it. Packs are placed slowest first, each
on the aligned ranks that finish it first.

With `sync=micro_batch` a second plan follows FlexSP (arXiv 2412.01523), and the better of the two is taken. Sequences
are sorted by length and cut into runs with equal tokens, one micro-batch for each run. Within a micro-batch the degrees
are the powers of two that make the slowest pack as fast as possible. FlexSP finds packs and degrees with an integer
program; here best fit makes the packs, and degrees are set as in the published planner. benchmarks/scale.py compares it
with FlexSP's own solver.

The cap, in tokens a rank, is tuned: either only for the packs, or one cap for packs and degrees, as in systems with one
setting for both.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dhp_ray.planner.baselines.pack_cap import capacities, degrees_at, powers_of_two, tuned
from dhp_ray.planner.baselines.paper import dealt, first_fit
from dhp_ray.planner.primitives.best_fit import Packs, best_fit_decreasing
from dhp_ray.planner.primitives.compiled import compiled
from dhp_ray.planner.primitives.list_schedule import on_earliest_blocks
from dhp_ray.planner.problem import Problem, packed, times_at
from dhp_ray.planner.schedule import Schedule, firsts_of, gathered
from dhp_ray.planner.timeline import time_of

RUNS = 5
"""How many numbers of runs are tried, from the least number of micro-batches upward, as in FlexSP's solver. One run for
the whole batch is tried too; its packs are in any order of length.
"""


def pow2(problem: Problem) -> Schedule:
    found = [tuned(problem, pow2_at)]
    if problem.sync == "micro_batch":
        least = -(-int(problem.items.tokens.sum()) // problem.cluster.max_tokens)
        kinds = [(1, False), *((runs, True) for runs in sorted({1, *range(least, least + RUNS)}))]
        found += [tuned(problem, partial(by_length_at, *kind)) for kind in kinds]
    return min(found, key=lambda schedule: time_of(problem, schedule))


def by_length_at(runs: int, rounded: bool, problem: Problem, pack_cap: int, degree_cap: int) -> Schedule:
    """The plan that follows FlexSP, in `runs` runs. A run that the ranks cannot hold at once becomes several
    micro-batches. `rounded`: the capacity of a pack is that of the power of two that its longest sequence needs;
    otherwise that of the fewest ranks that hold this sequence.
    """
    cluster, tokens = problem.cluster, problem.items.tokens
    longest_first = np.argsort(-tokens, kind="stable")
    before = np.cumsum(tokens[longest_first]) - tokens[longest_first]
    run = runs * before // tokens.sum()
    all_rows, sizes, micro_batch, count = [], [], [], 0
    for number in np.unique(run).tolist():
        rows = longest_first[run == number]
        need = (_powers if rounded else degrees_at)(tokens[rows], degree_cap, cluster.num_ranks)
        packs = best_fit_decreasing(tokens[rows], capacities(tokens[rows], need, pack_cap))
        packed_tokens = np.add.reduceat(tokens[rows][packs.rows], packs.first[:-1])
        of_pack, added = first_fit(_powers(packed_tokens, degree_cap, cluster.num_ranks), cluster.num_ranks)
        all_rows.append(rows[packs.rows])
        sizes.append(np.diff(packs.first))
        micro_batch.append(count + of_pack)
        count += added
    packs = Packs(np.concatenate(all_rows), firsts_of(np.concatenate(sizes)))
    items = packed(problem, packs)
    items.minimum_degree = _powers(items.tokens, degree_cap, cluster.num_ranks)
    return dealt(problem, packs, items, np.concatenate(micro_batch), powers=True)


def pow2_at(problem: Problem, pack_cap: int, degree_cap: int) -> Schedule:
    """Pack the sequences of each degree by best fit; a group of d ranks starts at a multiple of d. O(packs x ranks)."""
    cluster, machine, items = problem.cluster, problem.nominal_machine, problem.items
    degrees = _powers(items.tokens, degree_cap, cluster.num_ranks)
    all_rows, sizes, times, degree = [], [], [], []
    for each in np.unique(degrees).tolist():
        rows = np.flatnonzero(degrees == each)
        packs = best_fit_decreasing(items.tokens[rows], capacities(items.tokens[rows], each, pack_cap))
        packs = packs._replace(rows=rows[packs.rows])
        all_rows.append(packs.rows)
        sizes.append(np.diff(packs.first))
        times.append(times_at(packed(problem, packs), each, machine))
        degree.append(np.full(len(sizes[-1]), each))
    seconds, need = np.concatenate(times), np.concatenate(degree)
    order = np.lexsort((-need, -seconds))
    need = need[order]
    if problem.sync == "micro_batch":
        first, micro_batch = _aligned(need, cluster.num_ranks)
        in_time = np.argsort(micro_batch, kind="stable")
        order, need, first, micro_batch = order[in_time], need[in_time], first[in_time], micro_batch[in_time]
    else:
        first, micro_batch = on_earliest_blocks(need, seconds[order], problem.speeds), np.zeros_like(need)
    rows, first_row = gathered(np.concatenate(all_rows), firsts_of(np.concatenate(sizes)), order)
    first_rank = firsts_of(need)
    return Schedule(
        rows, first_row, np.repeat(first - first_rank[:-1], need) + np.arange(first_rank[-1]), first_rank, micro_batch
    )


def _powers(tokens: np.ndarray, cap: int, num_ranks: int) -> np.ndarray:
    return powers_of_two(degrees_at(tokens, cap, num_ranks), num_ranks)


@compiled
def _aligned(need: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """(the first rank of each pack's block, its micro-batch). A pack gets the first free aligned block of the first
    micro-batch that has one.

    `begin[m, l]`: in micro-batch m all blocks of 2^l ranks before this rank are taken. O(packs x micro-batches +
    ranks).
    """
    first, micro_batch = np.zeros(len(need), dtype=np.int64), np.zeros(len(need), dtype=np.int64)
    taken, begin = np.zeros((1, num_ranks), dtype=np.bool_), np.zeros((1, 64), dtype=np.int64)
    for pack in range(len(need)):
        degree, level, index = need[pack], 0, 0
        while 2**level < degree:
            level += 1
        while True:
            if index == len(taken):
                taken = np.concatenate((taken, np.zeros_like(taken)))
                begin = np.concatenate((begin, np.zeros_like(begin)))
            place, free = begin[index, level], 0
            while place + free < num_ranks and free < degree:  # past the next taken rank, to the next multiple
                if taken[index, place + free]:
                    place, free = place + degree, 0
                else:
                    free += 1
            begin[index, level] = place
            if free == degree:
                break
            index += 1
        first[pack], micro_batch[pack] = place, index
        for rank in range(place, place + degree):
            taken[index, rank] = True
    return first, micro_batch
