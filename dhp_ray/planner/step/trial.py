"""One trial of `sync=step`: can every item find room under a makespan?

1. Place the items that take longer than the makespan (or a share of it) on one rank: largest first, on the ranks that
   waste least.
2. Backfill the others, by best fit, into the gaps before those items and the tails after them.
3. If some fit nowhere, deal out all items of the tails again, evenly.
4. If that ends after the makespan, put what fits in no gap on several ranks, after everything else.

If that fails, place all items at least as long as the longest one left over together with the first ones, and try
again, up to `rounds` times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dhp_ray.planner.items import Items, Machine
from dhp_ray.planner.primitives.compiled import compiled, inner
from dhp_ray.planner.step.cached_groups import CachedGroups
from dhp_ray.planner.step.gaps import backfill, free_after
from dhp_ray.planner.step.partial_schedule import PartialSchedule, place_large
from dhp_ray.planner.step.rank_lists import RankLists
from dhp_ray.planner.step.tails import deal_out_tails


class Choices(NamedTuple):
    """Ways to try, one in each row. Items longer than the share `large` of the makespan on one rank are placed, the
    others are backfilled. `gap_weight`: the cost of a second of idle time before an item (`candidates`). `order`: the
    row of `orders` (items, largest first or nearly so) to use.
    """

    large: np.ndarray
    gap_weight: np.ndarray
    order: np.ndarray
    orders: np.ndarray


class Effort(NamedTuple):
    """Limits on a trial: the number of choices, of rounds for each choice, and of items that are placed last."""

    choices: int
    rounds: int
    leftover: int


class Found(NamedTuple):
    """A place for every item: in the partial schedule, in a bin (`rest`, largest first, and `bins`), or in `last`,
    after them.

    `choice` is -1 if there is none. `dealt_s`: the least makespan for which items dealt out had room; infinite if none
    were. `expected_s`: the makespan; if the trial failed, plus the seconds of the items left over, divided by the sum
    of all ranks' speeds.
    """

    choice: int
    makespan_s: float
    partial: PartialSchedule
    rest: np.ndarray
    bins: np.ndarray
    last: PartialSchedule
    dealt_s: float
    expected_s: float


@compiled
def try_makespan(
    items: Items,
    single_s: np.ndarray,
    makespan: float,
    machine: Machine,
    lists: RankLists,
    pool: CachedGroups,
    reuse_s: float,
    choices: Choices,
    begin: int,
    effort: Effort,
    dealt_s: float,
) -> Found:
    """Try up to `effort.choices` choices, from `begin` on, and return the first that finds room for every item.

    `single_s`: each item's time on one rank; infinite if it has more tokens than `machine.tokens_per_rank`.
    `dealt_s`: the least makespan for which small items are dealt out.
    """
    idle, none = np.zeros(len(machine.speeds)), np.zeros(0, dtype=np.int64)
    no_groups = CachedGroups(none, np.zeros(1, dtype=np.int64))
    partial = place_large(items, none, 0.0, makespan, machine, lists, idle, no_groups, 1.0, 0.0)
    last, least_s, expected_s = partial, np.inf, np.inf
    for step in range(effort.choices):
        choice = (begin + step) % len(choices.gap_weight)
        order = choices.orders[choices.order[choice]]
        smallest = choices.large[choice] * makespan
        for _ in range(effort.rounds):
            partial = place_large(
                items, order, smallest, makespan, machine, lists, idle, pool, choices.gap_weight[choice], reuse_s
            )
            if not partial.placed:
                break
            rest = _kept(order, single_s[order], -np.inf, smallest)
            bins = backfill(items, rest, partial, makespan, machine)
            left = _kept(rest, bins, -1.0, -1.0)
            if len(left) > 0 and makespan >= dealt_s:
                end_s = deal_out_tails(items, rest, bins, partial, makespan, machine)
                least_s, left = min(least_s, end_s), none if end_s <= makespan else left
            if len(left) <= effort.leftover:
                busy = free_after(items, rest, bins, partial, machine)
                last = place_large(items, left, 0.0, makespan, machine, lists, busy, no_groups, 1.0, 0.0)
                if last.placed:
                    rest, bins = _kept(rest, bins, 0.0, np.inf), _kept(bins, bins, 0.0, np.inf)
                    return Found(choice, makespan, partial, rest, bins, last, least_s, makespan)
            expected_s = min(expected_s, makespan + _work_s(items, left) / machine.speeds.sum())
            smallest = single_s[left].max() * (1 - 1e-9)
    return Found(-1, makespan, partial, none, none, last, least_s, expected_s if expected_s < np.inf else makespan)


@inner
def _work_s(items: Items, numbers: np.ndarray) -> float:
    """Total seconds of some items on one rank."""
    total_s = 0.0
    for number in numbers:
        item = items[number]
        total_s += item.language_s + item.vision_s
    return total_s


@inner
def _kept(numbers: np.ndarray, values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The numbers whose values lie between two limits (a mask would take seconds to compile)."""
    kept, count = np.zeros(len(numbers), dtype=np.int64), 0
    for index in range(len(numbers)):
        if low <= values[index] <= high:
            kept[count] = numbers[index]
            count += 1
    return kept[:count]
