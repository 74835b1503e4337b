"""A lower bound on the time of every plan of a batch.

Fix a makespan T. A sequence in a pack of degree d makes the pack last at least its own time alone, t(d); so it runs at a degree with t(d) <= T, and takes
at least the least area a(T) over those degrees, where area is rank-seconds weighted by speed. All areas must fit under T:

    sum of a_i(T) <= T * sum of speeds     and     t_i(d) <= T for some d, for every i

Both hold from some T on, and that T is the bound. The area of a sequence at degree d is its compute, plus its communication on the d slowest ranks, plus its
share of what a pack pays once (latency, pack_s): a pack of degree d holds at most d * tokens_per_rank tokens, so each token carries 1 / that many. Where
attention hides communication, a pack may hide more than its sequences do alone; the area then keeps compute only (times alone still hold: what the other
sequences of a pack hide they also compute).

With `sync=micro_batch` the same holds for the sum over micro-batches (each is at most T long), with fixed_s for as many micro-batches as the tokens need.
O(sequences x degrees x 40), over the distinct lengths only.
"""

from __future__ import annotations

import numpy as np

from dhp_ray.planner.problem import Problem


def lower_bound_s(problem: Problem) -> float:
    """Seconds that no plan of this batch can beat, fixed costs included."""
    cluster, cost = problem.cluster, problem.cost
    speeds = np.sort(np.array(cluster.speeds))
    total_speed = float(speeds.sum())
    time, area = _times_and_areas(problem, speeds)
    order = np.argsort(time, axis=1, kind="stable")
    time = np.take_along_axis(time, order, axis=1)
    area = np.minimum.accumulate(np.take_along_axis(area, order, axis=1), axis=1)
    shortest = float(time[:, 0].max())
    low = max(shortest, float(area[:, -1].sum()) / total_speed)
    high = max(low, float(area[:, 0].sum()) / total_speed)
    rows = np.arange(len(time))
    for _ in range(40):
        middle = (low + high) / 2
        last = np.maximum((time <= middle * (1 + 1e-12)).sum(axis=1) - 1, 0)
        if area[rows, last].sum() <= middle * total_speed:
            high = middle
        else:
            low = middle
        if high - low <= 1e-9 * high:
            break
    micro_batches = 1
    if problem.sync == "micro_batch":
        micro_batches = -(-int(problem.tokens.sum()) // cluster.max_tokens)
    return low + cost.fixed_s * micro_batches


def _times_and_areas(problem: Problem, speeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(K, N) least time alone and least area of each sequence at degrees 1 to N; infinite where it does not fit."""
    cluster, tables = problem.cluster, problem.tables
    num_ranks = cluster.num_ranks
    degrees = np.arange(1, num_ranks + 1)
    fastest = speeds[::-1]  # at best the d fastest ranks; the slowest of them sets the pace
    pace = fastest[degrees - 1]
    slowest_sum = np.cumsum(speeds)[degrees - 1]
    transfer = tables.transfer_s.min(axis=0)[1:]
    if num_ranks > cluster.ranks_per_node:
        transfer = np.where(degrees > cluster.ranks_per_node, tables.transfer_s[1, 1:], transfer)
    tokens, work = problem.tokens[:, None], problem.work_s[:, None]
    exposed = np.maximum(0.0, transfer * tokens - tables.hidden[1:] * problem.attention_s[:, None] / pace)
    encode = np.maximum(problem.vision_s[:, None] / np.cumsum(fastest), problem.image_s[:, None] / fastest[0])
    time = problem.language_s[:, None] / degrees / pace + encode + exposed + tables.latency_s[1:] + tables.pack_s
    share = tokens / (cluster.tokens_per_rank * degrees)
    once = np.minimum(1.0, share) * (tables.latency_s[1:] + tables.pack_s)
    area = work + ((0.0 if tables.hidden.any() else 1.0) * transfer * tokens + once) * slowest_sum
    misfit = degrees < problem.minimum_degree[:, None]
    return np.where(misfit, np.inf, time), np.where(misfit, np.inf, area)
