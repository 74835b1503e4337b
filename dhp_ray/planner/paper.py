"""The published planner (DHP, arXiv 2602.21788): packs by memory, then degrees for the packs of one micro-batch at a time.

1. Best-fit decreasing packs the sequences (`packing`).
2. Packs go, longest first, into the first micro-batch whose ranks still cover their minimum degrees.
3. In each micro-batch the ranks are dealt out so that the slowest pack is as fast as can be. The paper fills a table DP[i][j] in O(K N^2); the problem is a
   separable bottleneck, so the same optimum comes from a search on the makespan M: with T_i made non-increasing in d (a pack may leave ranks idle), pack i
   needs d_i(M) = the least d with T_i(d) <= M, and M can be had if the sum of d_i(M) is at most N. O(K log N) a trial, some 50 trials.

With `sync=step` the same packs run in the same order without a barrier, each on the ranks that are free first.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.packing import best_fit_decreasing
from dhp_ray.planner.problem import Placement, Problem


def dhp_paper(problem: Problem) -> list[Placement]:
    """Placements in order of execution."""
    num_ranks = problem.cluster.num_ranks
    packs = best_fit_decreasing(problem.tokens, problem.minimum_degree, problem.cluster.tokens_per_rank)
    free = np.zeros(num_ranks)
    placements = []
    for index, members in enumerate(micro_batches(problem, packs)):
        times = pack_times(problem, members)
        degrees = allocate(times, [int(-(-problem.tokens[pack].sum() // problem.cluster.tokens_per_rank)) for pack in members], num_ranks)
        if problem.sync == "micro_batch":
            free = np.zeros(num_ranks)
        ready = np.argsort(free, kind="stable")
        first = 0
        for pack in sorted(range(len(members)), key=lambda pack: -times[pack, degrees[pack] - 1]):
            ranks = np.sort(ready[first:first + degrees[pack]])
            first += degrees[pack]
            free[ranks] = free[ranks].max() + times[pack, degrees[pack] - 1]
            placements.append(Placement(tuple(ranks.tolist()), tuple(members[pack]), index))
    return placements


def micro_batches(problem: Problem, packs: list[list[int]]) -> list[list[list[int]]]:
    """Packs by micro-batch, first fit by the ranks that their memory needs. O(packs x micro-batches)."""
    groups: list[list[list[int]]] = []
    rooms: list[int] = []
    for pack in packs:
        need = int(-(-problem.tokens[pack].sum() // problem.cluster.tokens_per_rank))
        index = next((index for index, room in enumerate(rooms) if room >= need), len(rooms))
        if index == len(rooms):
            rooms.append(problem.cluster.num_ranks)
            groups.append([])
        rooms[index] -= need
        groups[index].append(pack)
    return groups


def pack_times(problem: Problem, packs: list[list[int]]) -> np.ndarray:
    """(packs, N) seconds of each pack at degrees 1 to N, on nominal ranks; a group larger than a node crosses nodes."""
    tables, num_ranks = problem.tables, problem.cluster.num_ranks
    degrees = np.arange(1, num_ranks + 1)
    language, attention, vision, tokens = (np.array([array[pack].sum() for pack in packs])[:, None] for array in (
        problem.language_s, problem.attention_s, problem.vision_s, problem.tokens))
    image = np.array([problem.image_s[pack].max() for pack in packs])[:, None]
    transfer = np.where(degrees > problem.cluster.ranks_per_node, tables.transfer_s[1, 1:], tables.transfer_s[0, 1:])
    exposed = np.maximum(0.0, transfer * tokens - tables.hidden[1:] * attention)
    times: np.ndarray = language / degrees + np.maximum(vision / degrees, image) + exposed + tables.latency_s[1:] + tables.pack_s
    return times


def allocate(times: np.ndarray, minimum_degree: list[int], num_ranks: int) -> list[int]:
    """The degree of each pack that makes the slowest fastest; `times` is (packs, N), the minimum degrees sum to at most N."""
    least = np.array(minimum_degree)
    best = times.copy()
    best[np.arange(1, num_ranks + 1) < least[:, None]] = np.inf
    best = np.minimum.accumulate(best, axis=1)
    low, high = float(best[:, -1].max()), float(best[np.arange(len(best)), least - 1].max())

    def needed(makespan: float) -> np.ndarray:
        return (best > makespan).sum(axis=1) + 1

    if needed(low).sum() <= num_ranks:
        high = low
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle).sum() <= num_ranks else (middle, high)
    return [int(degree) for degree in needed(high)]
