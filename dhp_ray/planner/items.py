"""What the schedulers place: sequences, or packs made beforehand, as arrays that the compiled loops read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.compiled import inner
from dhp_ray.planner.cost import Tables
from dhp_ray.planner.problem import Problem


class Items(NamedTuple):
    """One entry an item; seconds are one nominal rank's. A pack's are the sums of its sequences', `image_s` their largest."""

    language_s: np.ndarray
    attention_s: np.ndarray
    vision_s: np.ndarray
    image_s: np.ndarray
    tokens: np.ndarray
    minimum_degree: np.ndarray


class Machine(NamedTuple):
    """The cluster and its costs. `uniform`: all ranks have speed 1."""

    speeds: np.ndarray
    ranks_per_node: int
    tokens_per_rank: int
    uniform: bool
    fastest: float
    tables: Tables


def items_of(problem: Problem) -> Items:
    """Every sequence an item."""
    return Items(problem.language_s, problem.attention_s, problem.vision_s, problem.image_s, problem.tokens, problem.minimum_degree)


def items_of_packs(problem: Problem, packs: Sequence[Sequence[int]]) -> Items:
    """Every pack an item."""
    flat = np.concatenate([np.asarray(pack) for pack in packs])
    first = np.cumsum([0] + [len(pack) for pack in packs[:-1]])
    tokens = np.add.reduceat(problem.tokens[flat], first)
    language, attention, vision = (np.add.reduceat(array[flat], first) for array in (problem.language_s, problem.attention_s, problem.vision_s))
    return Items(language, attention, vision, np.maximum.reduceat(problem.image_s[flat], first), tokens, -(-tokens // problem.cluster.tokens_per_rank))


def machine_of(problem: Problem) -> Machine:
    speeds = np.array(problem.cluster.speeds)
    return Machine(speeds, problem.cluster.ranks_per_node, problem.cluster.tokens_per_rank, bool((speeds == 1.0).all()), float(speeds.max()), problem.tables)


@inner
def time_s(items: Items, item: int, degree: int, crosses: int, speed: float, tables: Tables) -> float:
    """Seconds of an item on `degree` ranks, the slowest of `speed` (`cost`, with images dealt out evenly)."""
    exposed = tables.transfer_s[crosses, degree] * items.tokens[item] - tables.hidden[degree] * items.attention_s[item] / speed
    encode = max(items.vision_s[item] / degree, items.image_s[item])
    return (items.language_s[item] / degree + encode) / speed + max(0.0, exposed) + tables.latency_s[degree] + tables.pack_s


@inner
def least_degree(items: Items, item: int, time_limit_s: float, machine: Machine) -> int:
    """The fewest ranks, were all as fast as the fastest, that run an item within a time, inside a node where they fit; 0 if none do.

    O(1) but where communication rules.
    """
    num_ranks = len(machine.speeds)
    degree = max(items.minimum_degree[item], int(items.language_s[item] / (time_limit_s * machine.fastest)))
    while degree <= num_ranks:
        if time_s(items, item, degree, 1 if degree > machine.ranks_per_node else 0, machine.fastest, machine.tables) <= time_limit_s:
            return degree
        degree += 1
    return 0
