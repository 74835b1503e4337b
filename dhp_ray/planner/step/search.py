"""`dhp` for sync=step: schedules the whole global batch as moldable parallel tasks, by a search on the makespan.

For a makespan T, each item needs some least number of ranks. Items that need several ranks are placed first, and the
others fill what is left (`trial`). If every item finds room, T is feasible. The search starts just above the lower
bound (`bound`), widens until it succeeds, and then bisects. What a failed trial leaves over, divided among all ranks,
tells about how much longer the next makespan must be. A trial is O(items x ranks) at worst. A large batch ends at
0.1 % above the bound, mostly with the first trial. If a quick search ends far from the bound, a thorough one follows,
which tries more choices for the cost of a gap and for the order of the items (shuffled with a fixed seed if the batch
is small). Small batches then go through a local search.

If a pack has a fixed cost, both packs made beforehand and single sequences are tried as items. Batches up to TINY
continue with both; larger ones continue with the better of the two after the quick search.

Sources: dual approximation (Hochbaum and Shmoys 1987), moldable tasks by a trial makespan (Mounie, Rapine and
Trystram 1999), best-fit decreasing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from dhp_ray.planner.items import Items, Machine, times_at
from dhp_ray.planner.pricing import making_s, time_of
from dhp_ray.planner.primitives.bisection import halve
from dhp_ray.planner.primitives.packing import Packs, best_fit_decreasing, unpacked
from dhp_ray.planner.problem import Problem, packed
from dhp_ray.planner.schedule import Schedule, by_owner, firsts_of, in_order
from dhp_ray.planner.step.cached_groups import CachedGroups, cached_groups_of
from dhp_ray.planner.step.gaps import packs_of_bins
from dhp_ray.planner.step.local_search import alike, best_order, placed_in_order
from dhp_ray.planner.step.rank_lists import RankLists, rank_lists
from dhp_ray.planner.step.trial import Choices, Effort, Found, try_makespan

VARIANTS = ((1.0, 0.25), (1.0, 1.0), (0.25, 1.0), (0.0, 1.0))
"""(large, gap_weight) of `trial.Choices`."""

WIDEN = (1e-3, 3e-3, 1e-2, 2e-2, 4e-2, 8e-2, 0.16, 0.32, 0.64, 1.3, 2.6, 5.2, 10.0, 100.0, 1e4)
"""The makespans that are tried first, as shares above the lower bound."""

TOLERANCE, FINE = 1e-3, 2e-4
"""The bisection ends when the feasible and the infeasible makespan differ by this share of the bound. FINE: for a batch
of at most SMALL items x ranks.
"""

REUSE = ((3e-3, 1.0), (9e-3, 0.1), (9e-3, 0.01))
"""The share by which a plan may be longer to use groups of the pool, and the waste that one group may add for it, as a
share of all ranks' time. The first pair that works is taken.
"""

MAKING = (0.05, 0.2)
"""If creating a group costs `group_s`: the plan may be longer by these shares of the cost of its new groups."""

TINY, SMALL, LARGE = 2_000, 20_000, 1_000_000
"""Items x ranks. Up to TINY: shuffled orders and a local search. Up to SMALL: thorough search from 0.1 % above the
bound. Up to LARGE: from 1 %. Beyond: always quick.
"""

ORDERS = 16
"""The most orders of the items that are tried."""


class Search:
    """Trials of one set of items, above a bound of the makespan. Each trial begins with the choice that worked last."""

    def __init__(
        self, items: Items, packs: Packs, machine: Machine, lists: RankLists, pool: CachedGroups, bound_s: float
    ) -> None:
        self.items, self.packs, self.machine, self.lists, self.pool = items, packs, machine, lists, pool
        work = items.language_s + items.vision_s
        alone = (items.tokens <= machine.tokens_per_rank) & (items.minimum_degree <= 1)
        self.single_s = np.where(alone, times_at(items, 1, machine), np.inf)
        self.size = len(work) * len(machine.speeds)
        orders = [np.argsort(-work, kind="stable")]
        rows = [(*variant, 0) for variant in VARIANTS[: 4 if self.size <= SMALL else 2]]
        if self.size <= TINY:
            generator = np.random.default_rng(0)
            for shuffled in range(1, min(ORDERS, SMALL // self.size)):
                orders.append(np.argsort(-work * np.exp(generator.normal(0.0, 0.4, len(work))), kind="stable"))
                rows.append((*VARIANTS[shuffled % len(VARIANTS)], shuffled))
        large, gap_weight, order = zip(*rows)
        self.choices = Choices(np.array(large), np.array(gap_weight), np.array(order), np.stack(orders))
        self.quick = Effort(choices=1, rounds=1, leftover=max(64, len(work) // 16))
        self.thorough = Effort(choices=len(rows), rounds=4, leftover=len(work))
        self.begin, self.bound_s, self.tolerance = 0, bound_s, FINE if self.size <= SMALL else TOLERANCE
        self.dealt_s = 0.0  # the least makespan for which small items are dealt out
        self.expected_s, self.num_failed = 0.0, 0  # of the last trial that failed (`Found`); failed ones in a row
        self._scheduled: tuple[Found, Schedule] | None = None  # the last result of `scheduled`

    def scheduled(self, found: Found) -> Schedule:
        """The schedule of the items; made only once for consecutive calls with the same result."""
        if self._scheduled is None or self._scheduled[0] is not found:
            self._scheduled = found, schedule_of(found, self.items, self.machine)
        return self._scheduled[1]

    def thoroughly(self, best: Found, problem: Problem) -> list[Found]:
        """The shortest makespan found, given that a quick search found `best`; or what `reused` returns for it."""
        if self.size <= LARGE and best.makespan_s > self.bound_s * (1 + (1e-3 if self.size <= SMALL else 1e-2)):
            self._expect_nothing()  # what the quick search left over may find room
            best = self.bisect(best, self.bound_s, self.tolerance, self.thorough)
        return self.reused(best, problem) if len(self.pool.first) > 1 else [best]

    def reused(self, best: Found, problem: Problem) -> list[Found]:
        """The first successful trial with groups of the pool wherever they fit, for a makespan that is a little longer
        (REUSE); `best` if none succeeds. If creating a group costs time, `best` in any case, and also trials of
        makespans that are longer by a share of the cost of the new groups (MAKING); `dhp` chooses among them.
        """
        effort, num_ranks = self.thorough if self.size <= SMALL else self.quick, len(self.machine.speeds)
        limits = [(best.makespan_s * (1 + slack), share * best.makespan_s * (1 + slack)) for slack, share in REUSE]
        tried = (self.trial(makespan_s, effort, waste_s * num_ranks) for makespan_s, waste_s in limits)
        again, group_s = list(islice(filter(None, tried), 1)), problem.cost.group_s
        if group_s == 0.0:
            return again or [best]
        slack_s = making_s(problem, schedule_of(best, self.items, self.machine))
        longer = [self.trial(best.makespan_s + share * slack_s, effort, group_s * num_ranks) for share in MAKING]
        return [best, *again, *filter(None, longer)]

    def below(self, makespan_s: float, tolerance: float, effort: Effort) -> bool:
        """Whether a trial succeeds for a makespan that is shorter than this one by the share `tolerance`."""
        return self.trial(makespan_s * (1 - tolerance), effort) is not None

    def shortest(self, tolerance: float, effort: Effort) -> Found:
        """The first feasible makespan above the bound, bisected to a tolerance, a share of the bound."""
        failed_s = self.bound_s
        self._expect_nothing()
        for share in WIDEN:
            makespan_s = max(self.bound_s * (1 + share), self._ahead_s(tolerance * self.bound_s))
            if failed_s < self.dealt_s < makespan_s:
                makespan_s = self.dealt_s
            found = self.trial(makespan_s, effort)
            if found:
                return self.bisect(found, failed_s, tolerance, effort)
            failed_s = makespan_s
        raise AssertionError("no makespan is long enough")

    def bisect(self, best: Found, failed_s: float, tolerance: float, effort: Effort) -> Found:
        """Bisect to a makespan that is within a tolerance, a share of the bound, of an infeasible one. `best` is
        feasible; `failed_s` is infeasible or the bound. The next trial is halfway between them, or at `_ahead_s` if
        that is more than a step (the tolerance) below the feasible one. Otherwise it is at `expected_s`, if that lies
        between them, but at least halfway and at most a step below the feasible one: it mostly fails, which ends the
        bisection.
        """
        span, step_s = np.array([failed_s, best.makespan_s, 0.0]), tolerance * self.bound_s
        while halve(span, step_s * (1 + 1e-9) / best.makespan_s):  # a step that was rounded up is a step
            ahead_s, close_s = self._ahead_s(step_s), span[1] - step_s
            if span[0] < self.expected_s < span[1]:
                span[2] = ahead_s if ahead_s < close_s else max(span[2], min(self.expected_s, close_s))
            found = self.trial(float(span[2]), effort)
            span[int(found is not None)] = span[2]
            best = found or best
        return best

    def trial(self, makespan_s: float, effort: Effort, reuse_s: float = 0.0) -> Found | None:
        """All items under a makespan, or None if it is infeasible."""
        found = try_makespan(
            self.items,
            self.single_s,
            makespan_s,
            self.machine,
            self.lists,
            self.pool,
            reuse_s,
            self.choices,
            self.begin,
            effort,
            self.dealt_s,
        )
        if found.choice < 0:
            self.dealt_s = found.dealt_s if found.dealt_s < np.inf else self.dealt_s
            self.expected_s, self.num_failed = found.expected_s, self.num_failed + 1
            return None
        self.begin, self.num_failed = found.choice, 0
        return found

    def _expect_nothing(self) -> None:
        self.expected_s, self.num_failed = 0.0, 0

    def _ahead_s(self, step_s: float) -> float:
        """A makespan that may succeed after the last failed trial: `expected_s`, which is mostly a little too short,
        plus a step, which doubles with each consecutive failure.
        """
        return self.expected_s + step_s * 2 ** max(self.num_failed - 1, 0)


def dhp_step(problem: Problem, below_s: float = np.inf) -> list[Schedule]:
    """Candidate schedules; none where one thorough trial finds nothing shorter than `below_s`, with fixed costs."""
    machine, bound_s = problem.machine, problem.lower_bound_s - problem.cost.fixed_s
    tiny = len(problem.items) * len(machine.speeds) <= TINY
    if tiny and (machine.rates.inside_s == machine.rates.across_s).all():
        machine = _as_one_node(machine)
    pool, lists, local = cached_groups_of(problem), rank_lists(machine), tiny and alike(machine)
    found, at_bound = list[tuple[Found, Search]](), False
    for items, packs in item_sets(problem):
        search = Search(items, packs, machine, lists, pool, bound_s)
        if below_s < np.inf and not search.below(below_s - problem.cost.fixed_s, search.tolerance, search.thorough):
            continue
        if found and search.size > LARGE and not search.below(found[0][0].makespan_s, search.tolerance, search.quick):
            break
        found.append((search.shortest(search.tolerance, search.quick), search))
        at_bound = _packs_cost(machine) and _at_bound(
            problem, unpacked(search.scheduled(found[-1][0]), packs), bound_s)
        if at_bound:
            break
    if not found:
        return []
    if at_bound:
        found = found[-1:]
    elif not tiny:
        found = [min(found, key=lambda one: one[0].makespan_s)]
    return [schedule for quick, search in found for schedule in _improved(quick, search, problem, local)]


def _improved(quick: Found, search: Search, problem: Problem, local: bool) -> list[Schedule]:
    """The schedules that follow from a quick search's result. `local`: a local search is one of them."""
    best, *reusing = search.thoroughly(quick, problem)
    schedule, *others = [search.scheduled(found) for found in (best, *reusing)]
    schedules = [unpacked(one, search.packs) for one in (schedule, *others)]
    target_s = search.bound_s * (1 + 2e-4)
    if local and best.makespan_s > target_s:
        ordered = best_order(search.items, schedule, search.machine, target_s)
        schedules.append(unpacked(placed_in_order(ordered, search.items, search.machine), search.packs))
    return schedules


def _at_bound(problem: Problem, schedule: Schedule, bound_s: float) -> bool:
    """Whether a schedule is no longer than the first makespan that is tried."""
    return time_of(problem, schedule) - problem.cost.fixed_s <= bound_s * (1 + WIDEN[0])


def _packs_cost(machine: Machine) -> bool:
    """Whether a pack has a fixed cost, or hides communication that its sequences alone would not."""
    return bool(machine.rates.overhead_s.any() or machine.rates.overlap.any())


def _as_one_node(machine: Machine) -> Machine:
    """The same ranks as one node, for costs that are the same inside nodes and across."""
    return machine._replace(
        node=np.zeros_like(machine.node), first=np.array([0, len(machine.speeds)]), ranks_per_node=len(machine.speeds)
    )


def item_sets(problem: Problem) -> Iterator[tuple[Items, Packs]]:
    """Single sequences and, if a pack has a fixed cost, packs made beforehand: half full, as packs of one rank leave
    gaps otherwise; if all have several ranks, as full as memory allows.
    """
    items, each = problem.items, np.arange(len(problem.items) + 1)
    yield items, Packs(each[:-1], each)
    if _packs_cost(problem.machine):
        least, full = int(items.minimum_degree.min()), problem.machine.tokens_per_rank
        packs = best_fit_decreasing(items.tokens, items.minimum_degree * (full if least > 1 else max(1, full // 2)))
        made = packed(problem, packs)
        made.minimum_degree = np.maximum(made.minimum_degree, least)
        yield made, packs


def schedule_of(found: Found, items: Items, machine: Machine) -> Schedule:
    """Groups of items, sorted by start, so that ranks that share two groups meet them in this order."""
    partials = (found.partial, found.last)
    filled = packs_of_bins(items, found.rest, found.bins, found.partial, machine)
    members, first = by_owner(filled.pack, len(filled.rank))
    placed = np.concatenate([partial.item for partial in partials])
    starts = np.concatenate([*(partial.start for partial in partials), filled.start])
    sizes = np.concatenate([np.ones(len(placed), dtype=np.int64), np.diff(first)])
    degrees = np.concatenate(
        [*(np.diff(partial.first) for partial in partials), np.ones(len(filled.rank), dtype=np.int64)]
    )
    item = np.concatenate([placed, found.rest[members]])
    ranks = np.concatenate([*(partial.ranks for partial in partials), filled.rank])
    groups = Schedule(item, firsts_of(sizes), ranks, firsts_of(degrees), np.zeros(len(starts), dtype=np.int64))
    return in_order(groups, np.argsort(starts, kind="stable"))
