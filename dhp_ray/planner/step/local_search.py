"""A local search over order and degrees, for small batches of `sync=step` on equal ranks.

A plan is an order of the items and a degree for each. Items are placed one after another, each on the ranks that are
free first. Every schedule can be made in this way without becoming longer: if its items are sorted by start, none
starts later than it did. A step of the search moves an item, swaps two items or changes a degree. The step is kept if
it lengthens the plan by no more than a random share of a threshold that falls to zero (threshold accepting, Dueck and
Scheuer 1990). The search runs from several seeds. O(steps x items x ranks) time, O(items x ranks) memory.

The first start is the plan, or list scheduling if that is shorter: largest first, each item on the fewest ranks on
which it ends by some time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Items, Machine, times_at
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.primitives.list_schedule import run_next, run_on_first_free
from dhp_ray.planner.schedule import Schedule, firsts_of

THRESHOLD = 0.3
"""The share by which a step may lengthen the plan at first."""

WORK, STEPS, SEEDS = 2_000_000, 2000, 9
"""Approximate total of steps x items x ranks; the least steps from each seed; the most seeds. There are always three
seeds, one for each start.
"""

TRIALS = 32
"""Number of times tried, evenly spaced from the target on, by which items must end on the fewest ranks, to find a
better start than the plan.
"""


class Ordered(NamedTuple):
    """Items in the order of placement, and the degree of each item (by its number). `times[i, d]`: seconds of item i on
    d ranks.
    """

    makespan_s: float
    order: np.ndarray
    degree: np.ndarray
    times: np.ndarray


def alike(machine: Machine) -> bool:
    """Whether it does not matter which ranks form a group."""
    one_kind = (
        len(machine.first) == 2 or len(machine.first) == len(machine.speeds) + 1
    )  # all on one node, or each on its own
    return machine.uniform and (one_kind or bool((machine.rates.inside_s == machine.rates.across_s).all()))


def best_order(items: Items, schedule: Schedule, machine: Machine, target_s: float) -> Ordered:
    """The best order found. Starts: a schedule of the items, and largest first on as few and on as many ranks as
    possible. Ends early at `target_s`.
    """
    degrees = range(1, len(machine.speeds) + 1)
    times = np.stack([np.full(len(items), np.inf), *(times_at(items, degree, machine) for degree in degrees)], axis=1)
    degree = np.zeros(len(items), dtype=np.int64)
    degree[schedule.rows] = np.repeat(np.diff(schedule.first_rank), np.diff(schedule.first_row))
    steps = max(STEPS, STEPS // 4 * (len(items) // 8))
    seeds = int(np.clip(WORK // (steps * times.size), 3, SEEDS))
    largest_first = np.argsort(-items.language_s - items.vision_s, kind="stable")
    orders = np.stack([schedule.rows, largest_first, largest_first])
    return _search(
        times,
        orders,
        np.stack([degree, items.minimum_degree, np.full_like(degree, len(machine.speeds))]),
        target_s,
        steps,
        seeds,
    )


@inner
def _makespan(times: np.ndarray, order: np.ndarray, degree: np.ndarray, free: np.ndarray) -> float:
    """The makespan of an order. `free`: space for the times at which ranks become free, ascending."""
    free[:] = 0.0
    for item in order:
        run_on_first_free(degree[item], times[item, degree[item]], free)
    return free[-1]


@inner
def _on_fewest_ranks(
    times: np.ndarray, order: np.ndarray, limit_s: float, least: np.ndarray, degree: np.ndarray, free: np.ndarray
) -> float:
    """The makespan if each item has the fewest ranks on which it ends by a time, or all ranks; sets `degree`. `least`:
    the fewest ranks that hold each item.
    """
    free[:] = 0.0
    for item in order:
        degree[item] = least[item]
        while degree[item] < len(free) and free[degree[item] - 1] + times[item, degree[item]] > limit_s:
            degree[item] += 1
        run_on_first_free(degree[item], times[item, degree[item]], free)
    return free[-1]


@inner
def _next(state: int) -> int:
    """A linear congruential generator, the same compiled and uncompiled."""
    return (state * 1103515245 + 12345) % 2147483648


@inner
def _move(order: np.ndarray, source: int, target: int) -> None:
    item = order[source]
    for place in range(source, target):
        order[place] = order[place + 1]
    for place in range(source, target, -1):
        order[place] = order[place - 1]
    order[target] = item


@compiled
def _search(
    times: np.ndarray, orders: np.ndarray, degrees: np.ndarray, target_s: float, steps: int, seeds: int
) -> Ordered:
    count, num_ranks, minimum_degree = times.shape[0], times.shape[1] - 1, degrees[1]
    free, best_order, best_degree = np.zeros(num_ranks), orders[0].copy(), degrees[0].copy()
    best_s = _makespan(times, best_order, best_degree, free)
    for trial in range(TRIALS):
        limit_s = target_s + (best_s - target_s) * trial / TRIALS
        if _on_fewest_ranks(times, orders[1], limit_s, minimum_degree, degrees[0], free) < best_s:
            best_s, best_order[:], best_degree[:] = free[-1], orders[1], degrees[0]
    orders[0], degrees[0] = best_order, best_degree
    for seed in range(seeds):
        order, degree = orders[seed % len(orders)].copy(), degrees[seed % len(orders)].copy()
        now_order, now_degree = order.copy(), degree.copy()
        state, now_s = seed + 1, _makespan(times, order, degree, free)
        for step in range(steps):
            state = _next(state)
            move, one = (state >> 8) % 3, (state >> 12) % count
            state = _next(state)
            other = (state >> 8) % count
            item = order[one]
            if move == 0:
                degree[item] = minimum_degree[item] + (state >> 8) % (num_ranks - minimum_degree[item] + 1)
            elif move == 1:
                order[one], order[other] = order[other], item
            else:
                _move(order, one, other)
            state = _next(state)
            found_s = _makespan(times, order, degree, free)
            if found_s - now_s <= THRESHOLD * now_s * (1.0 - step / steps) * ((state >> 8) % 1024) / 1024.0:
                now_s, now_order[:], now_degree[:] = found_s, order, degree
            else:
                order[:], degree[:] = now_order, now_degree
            if now_s < best_s * (1.0 - 1e-12):
                best_s, best_order[:], best_degree[:] = now_s, now_order, now_degree
                if best_s <= target_s:
                    return Ordered(best_s, best_order, best_degree, times)
    return Ordered(best_s, best_order, best_degree, times)


def placed_in_order(ordered: Ordered, items: Items, machine: Machine) -> Schedule:
    """Place each item on the ranks that are free first. Items that run on the same ranks one after another form a pack
    if memory allows.
    """
    free, last, tokens = np.zeros(len(machine.speeds)), np.full(len(machine.speeds), -1), items.tokens
    members: list[list[int]] = []
    ranks: list[np.ndarray] = []
    for item in ordered.order.tolist():
        need = int(ordered.degree[item])
        chosen = np.sort(np.argsort(free, kind="stable")[:need])
        run_next(chosen, ordered.times[item, need], free)
        group = int(last[chosen[0]])
        if (
            group < 0
            or len(ranks[group]) != need
            or (last[chosen] != group).any()
            or (tokens[[*members[group], item]].sum() > need * machine.tokens_per_rank)
        ):
            group = len(members)
            members.append([])
            ranks.append(chosen)
        members[group].append(item)
        last[chosen] = group
    return Schedule(
        np.concatenate(members),
        firsts_of([len(group) for group in members]),
        np.concatenate(ranks),
        firsts_of([len(group) for group in ranks]),
        np.zeros(len(members), dtype=np.int64),
    )
