"""A batch as the constructors and the improver of the search see it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost.rates import Rates
from dhp_ray.planner.problem import Items, Machine, Problem


class SearchBatch(NamedTuple):
    """What does not change while a batch is planned in one way.

    work: seconds of each sequence on a rank. by_work: sequences, largest first; place: the place of each there.
    by_tokens: tokens of all, rising; most_work: the most work of those with so many tokens or fewer; least_tokens: the
    fewest tokens of a second of work. capacity: tokens of a pack that a rank holds. nodes_matter: groups across nodes
    take longer.
    """

    items: Items
    work: np.ndarray
    by_work: np.ndarray
    place: np.ndarray
    by_tokens: np.ndarray
    most_work: np.ndarray
    least_tokens: float
    first_image: np.ndarray
    image_s: np.ndarray
    patches: np.ndarray
    speeds: np.ndarray
    node: np.ndarray
    node_size: int
    nodes_matter: bool
    uniform: bool
    capacity: int
    rates: Rates
    fixed_s: float
    lockstep: bool


def batch_of(problem: Problem) -> SearchBatch:
    items, machine = problem.items, problem.machine
    work = items.language_s + items.vision_s
    by_work = np.argsort(-work, kind="stable")
    place = np.empty_like(by_work)
    place[by_work] = np.arange(len(by_work))
    by_tokens = np.argsort(items.tokens, kind="stable")
    return SearchBatch(
        items,
        work,
        by_work,
        place,
        items.tokens[by_tokens],
        np.maximum.accumulate(work[by_tokens]),
        float((items.tokens / work).min()),
        problem.first_image,
        problem.all_image_s,
        problem.all_image_patches,
        machine.speeds,
        machine.node,
        machine.ranks_per_node,
        nodes_matter(machine),
        machine.uniform,
        machine.tokens_per_rank,
        machine.rates,
        problem.cost.fixed_s,
        problem.sync == "micro_batch",
    )


def nodes_matter(machine: Machine) -> bool:
    """Whether groups across nodes take longer."""
    return bool((machine.rates.inside_s < machine.rates.across_s).any()) and len(machine.first) > 2
