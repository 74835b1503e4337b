"""`dhp` for sync=step: the whole global batch as moldable parallel tasks, by a search on the makespan.

For a makespan T, each item needs some least number of ranks; the large ones are placed first, the small ones fill what is left (`trial`). If all find room, T
can be had. The search starts just above the lower bound (`bound`), widens until it succeeds, then bisects; a trial is O(items x ranks) at worst. A large batch
is done at 0.1 % above the bound, mostly at the first trial; a quick search that ends far from the bound is followed by a thorough one, which tries more choices
of what counts as large, what a gap costs and in which order items come (shuffled by a fixed seed where the batch is small).

Where a pack costs something by itself, packs made beforehand are tried as items as well as single sequences.

Sources: dual approximation (Hochbaum and Shmoys 1987), moldable tasks by a trial makespan (Mounie, Rapine and Trystram 1999), best-fit decreasing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dhp_ray.planner.fill import packs_of_bins
from dhp_ray.planner.items import Items, Machine, items_of, items_of_packs, machine_of
from dhp_ray.planner.known_sets import Sets
from dhp_ray.planner.packing import best_fit_decreasing
from dhp_ray.planner.problem import Placement, Problem
from dhp_ray.planner.skeleton import Skeleton
from dhp_ray.planner.trial import Choices, Effort, Found, try_makespan

VARIANTS = ((1.0, 0.25), (1.0, 1.0), (0.25, 1.0), (0.0, 1.0))
"""(large, gap_weight) of `trial.Choices`."""

WIDEN = (1e-3, 3e-3, 1e-2, 2e-2, 4e-2, 8e-2, 0.16, 0.32, 0.64, 1.3, 2.6, 5.2, 10.0, 100.0, 1e4)
"""Makespans that are tried first, above the lower bound, as a share of it."""

REUSE_SLACK, REUSE = 5e-3, (1.0, 0.03, 0.01, 0.003, 0.001)
"""What a plan may be longer, as a share, to use groups of the pool; what one group may waste for that, as a share of all ranks' time, most first."""

REUSE_SLACK, REUSE = 5e-3, (1.0, 0.03, 0.01, 0.003, 0.001)
"""What a plan may be longer, as a share, to use groups of the pool; what one group may waste for that, as a share of all ranks' time, most first."""

TINY, SMALL, LARGE = 2_000, 20_000, 1_000_000
"""Items x ranks: up to TINY with shuffled orders, up to SMALL thorough from 0.1 % above the bound, up to LARGE from 1 %; beyond, always quick."""


class Search:
    """Trials of one set of items; goes on from the choice that worked last."""

    def __init__(self, items: Items, machine: Machine, pool: Sets) -> None:
        self.items, self.machine, self.pool = items, machine, pool
        work = items.language_s + items.vision_s
        self.single_s = np.where(items.minimum_degree == 1, items.language_s + np.maximum(items.vision_s, items.image_s) + machine.tables.pack_s, np.inf)
        self.size = len(work) * len(machine.speeds)
        orders = [np.argsort(-work, kind="stable")]
        rows = [(*variant, 0) for variant in VARIANTS[:4 if self.size <= SMALL else 2]]
        if self.size <= TINY:
            generator = np.random.default_rng(0)
            for shuffled in range(1, min(100, SMALL // self.size)):
                orders.append(np.argsort(-work * np.exp(generator.normal(0.0, 0.4, len(work))), kind="stable"))
                rows.append((*VARIANTS[shuffled % len(VARIANTS)], shuffled))
        large, gap_weight, order = zip(*rows)
        self.choices = Choices(np.array(large), np.array(gap_weight), np.array(order), np.stack(orders))
        self.quick = Effort(choices=2, rounds=1, leftover=max(64, len(work) // 16))
        self.thorough = Effort(choices=len(rows), rounds=4, leftover=len(work))
        self.begin = 0

    def run(self, bound_s: float) -> Found:
        """The shortest makespan found."""
        tolerance_s = bound_s * (1e-3 if self.size > SMALL else 2e-4)
        best, failed_s = self.widen(bound_s)
        best = self.bisect(best, failed_s, tolerance_s, self.quick)
        if self.size <= (LARGE if self.machine.uniform else TINY) and best.makespan_s > bound_s * (1 + (1e-3 if self.size <= SMALL else 1e-2)):
            best = self.bisect(best, bound_s, tolerance_s, self.thorough)
        return self.reused(best)

    def reused(self, best: Found) -> Found:
        """The same again with groups of the pool wherever they fit, for a makespan that is longer by REUSE_SLACK at most."""
        if len(self.pool.first) > 1:
            makespan_s = best.makespan_s * (1 + REUSE_SLACK)
            for share in REUSE:
                found = self.trial(makespan_s, self.quick, share * makespan_s * len(self.machine.speeds))
                if found:
                    return found
        return best

    def widen(self, bound_s: float) -> tuple[Found, float]:
        """The first makespan above the bound that can be had, and the last that cannot."""
        failed_s = bound_s
        for share in WIDEN:
            found = self.trial(bound_s * (1 + share), self.quick)
            if found:
                return found, failed_s
            failed_s = bound_s * (1 + share)
        raise AssertionError("no makespan is long enough")

    def bisect(self, best: Found, failed_s: float, tolerance_s: float, effort: Effort) -> Found:
        while best.makespan_s - failed_s > tolerance_s:
            middle_s = (best.makespan_s + failed_s) / 2
            found = self.trial(middle_s, effort)
            if found:
                best = found
            else:
                failed_s = middle_s
        return best

    def trial(self, makespan_s: float, effort: Effort, reuse_s: float = 0.0) -> Found | None:
        """All items under a makespan, or None."""
        found = try_makespan(self.items, self.single_s, makespan_s, self.machine, self.pool, reuse_s, self.choices, self.begin, effort)
        if found.choice < 0:
            return None
        self.begin = found.choice
        return found


def dhp_step(problem: Problem, bound_s: float) -> list[list[Placement]]:
    """Candidate plans, each with its placements in order of execution; `bound_s` excludes fixed costs."""
    machine, pool = machine_of(problem), sets_of(problem)
    candidates: list[tuple[Items, list[list[int]] | None]] = [(items_of(problem), None)]
    if problem.tables.pack_s or problem.tables.latency_s.any() or problem.tables.hidden.any():
        for share in (1.0, 0.5):
            packs = best_fit_decreasing(problem.tokens, problem.minimum_degree, max(1, int(problem.cluster.tokens_per_rank * share)))
            candidates.append((items_of_packs(problem, packs), packs))
    return [placements_of(Search(items, machine, pool).run(bound_s), items, machine, packs) for items, packs in candidates]


def sets_of(problem: Problem) -> Sets:
    """Groups of the pool that this cluster can form."""
    known = [ranks for ranks in problem.pool if len(ranks) > 1 and min(ranks) >= 0 and max(ranks) < problem.cluster.num_ranks]
    flat = np.array([rank for ranks in known for rank in sorted(ranks)], dtype=np.int64)
    return Sets(flat, np.cumsum([0] + [len(ranks) for ranks in known]))


def placements_of(found: Found, items: Items, machine: Machine, packs: Sequence[Sequence[int]] | None) -> list[Placement]:
    """Groups by their start: ranks that share two groups meet them in this order."""
    groups: list[tuple[tuple[int, ...], list[int]]] = []
    starts: list[float] = []
    for skeleton in (found.skeleton, found.last):
        groups += _groups_of(skeleton)
        starts += skeleton.start.tolist()
    holes = found.skeleton
    pack, pack_bin, pack_s = packs_of_bins(items, found.rest, found.bins, len(holes.hole_rank) + len(machine.speeds), machine.tokens_per_rank)
    members: list[list[int]] = [[] for _ in pack_bin]
    for item, into in zip(found.rest.tolist(), pack.tolist()):
        members[into].append(item)
    bin_rank = np.concatenate([holes.hole_rank, np.arange(len(machine.speeds))]).tolist()
    clock = np.concatenate([holes.hole_start, holes.free]).tolist()
    speeds = machine.speeds.tolist()
    for rows, bin_, seconds in zip(members, pack_bin.tolist(), pack_s.tolist()):
        rank = bin_rank[bin_]
        groups.append(((rank,), rows))
        starts.append(clock[bin_])
        clock[bin_] += seconds / speeds[rank] + machine.tables.pack_s
    in_time = [groups[index] for index in np.argsort(np.array(starts), kind="stable").tolist()]
    if packs is None:
        return [Placement(ranks, tuple(rows)) for ranks, rows in in_time]
    return [Placement(ranks, tuple([row for item in rows for row in packs[item]])) for ranks, rows in in_time]


def _groups_of(skeleton: Skeleton) -> list[tuple[tuple[int, ...], list[int]]]:
    ranks, first = skeleton.ranks.tolist(), skeleton.first.tolist()
    return [(tuple(ranks[first[group]:first[group + 1]]), [item]) for group, item in enumerate(skeleton.item.tolist())]
