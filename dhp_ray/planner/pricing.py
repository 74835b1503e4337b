"""Prices placements: the predicted time of each on its very ranks, its memory, and which member encodes which image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dhp_ray.planner.compiled import compiled
from dhp_ray.planner.encoders import encoders_of
from dhp_ray.planner.plan import GroupPlan, Pack
from dhp_ray.planner.problem import Placement, Problem


def times_of(problem: Problem, placements: Sequence[Placement]) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Seconds of each placement, and the encoders of its images. The formulas are `cost`'s; all placements at once."""
    tables, cluster = problem.tables, problem.cluster
    rows = np.array([row for placement in placements for row in placement.sequences], dtype=np.int64)
    first_row = _firsts([len(placement.sequences) for placement in placements])
    ranks = np.array([rank for placement in placements for rank in placement.ranks], dtype=np.int64)
    degree = np.array([len(placement.ranks) for placement in placements])
    first_rank = _firsts(degree)
    speed = np.minimum.reduceat(np.array(cluster.speeds)[ranks], first_rank)
    nodes = ranks // cluster.ranks_per_node
    crosses = (np.minimum.reduceat(nodes, first_rank) != np.maximum.reduceat(nodes, first_rank)).astype(np.int64)
    tokens, language, attention = (np.add.reduceat(array[rows], first_row) for array in (problem.tokens, problem.language_s, problem.attention_s))
    exposed = np.maximum(0.0, tables.transfer_s[crosses, degree] * tokens - tables.hidden[degree] * attention / speed)
    encoders: list[tuple[int, ...]] = [()] * len(placements)
    encode = np.zeros(len(placements))
    if problem.num_images:
        for index, placement in enumerate(placements):
            encoders[index], encode[index] = _encoders(problem, placement)
    return language / (degree * speed) + encode + exposed + tables.latency_s[degree] + tables.pack_s, encoders


def groups_of(problem: Problem, placements: Sequence[Placement], times: np.ndarray, encoders: Sequence[tuple[int, ...]]) -> tuple[GroupPlan, ...]:
    resident, per_token = problem.cost.resident(problem.sync), problem.cost.memory_bytes_per_token
    rows = np.array([row for placement in placements for row in placement.sequences], dtype=np.int64)
    tokens = np.add.reduceat(problem.tokens[rows], _firsts([len(placement.sequences) for placement in placements]))
    memory = resident + per_token * tokens / np.array([len(placement.ranks) for placement in placements])
    return tuple([GroupPlan(placement.ranks, Pack(placement.sequences), time, bytes_, placement.micro_batch, members)
                  for placement, time, bytes_, members in zip(placements, times.tolist(), memory.tolist(), encoders)])


def makespan_of(problem: Problem, placements: Sequence[Placement], times: np.ndarray) -> float:
    """Seconds of the whole step, fixed costs included (`timeline`)."""
    fixed_s = problem.cost.fixed_s
    if problem.sync == "micro_batch":
        index = np.array([placement.micro_batch for placement in placements])
        slowest = np.zeros(index.max() + 1)
        np.maximum.at(slowest, index, times)
        return float(slowest.sum() + fixed_s * len(np.unique(index)))
    ranks = np.array([rank for placement in placements for rank in placement.ranks], dtype=np.int64)
    first = np.append(_firsts([len(placement.ranks) for placement in placements]), len(ranks))
    return fixed_s + float(_finish(ranks, first, times, problem.cluster.num_ranks))


@compiled
def _finish(ranks: np.ndarray, first: np.ndarray, times: np.ndarray, num_ranks: int) -> float:
    free = np.zeros(num_ranks)
    for group in range(len(times)):
        start = 0.0
        for position in range(first[group], first[group + 1]):
            start = max(start, free[ranks[position]])
        for position in range(first[group], first[group + 1]):
            free[ranks[position]] = start + times[group]
    return free.max()


def _encoders(problem: Problem, placement: Placement) -> tuple[tuple[int, ...], float]:
    image_s = [seconds for row in placement.sequences for seconds in problem.cost.image_s(problem.samples[row])]
    if image_s and not any(image_s):  # without vision costs, balance patches
        image_s = [float(t * h * w) for row in placement.sequences for t, h, w in problem.samples[row].vision_grids]
        return encoders_of(image_s, [1.0] * len(placement.ranks))[0], 0.0
    return encoders_of(image_s, [problem.cluster.speeds[rank] for rank in placement.ranks])


def _firsts(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
