"""The search: starts by the constructor of the mode, then the improver on the shortest, until the plan is near the
bound.

A start has a way to relieve packs (`ways.py`), a least degree of packs and, in `step`, whether a single rank is allowed
nevertheless. The plain start is made first. Each other one must be shorter than the shortest plan so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.search.batch import SearchBatch, batch_of, nodes_matter
from dhp_ray.planner.search.improve import improve
from dhp_ray.planner.search.placing import cached_groups_of
from dhp_ray.planner.search.rounds import WASTE, Rounds
from dhp_ray.planner.search.state import schedule_of, state_of
from dhp_ray.planner.search.targets import STEPS, shortest_under_targets, with_groups_of_the_pool
from dhp_ray.planner.search.ways import ways_of
from dhp_ray.planner.timeline import group_creation_s, new_groups, time_of

LEAST_DEGREES, PARTS = (1, 2, 4, 8), 4
"""Packs have at least so many ranks, or all ranks or down to a PARTS-th of them (of a small batch up to eight ranks, or
any part); with sync=step, both all packs and those of sequences that one rank does not end by the target."""

SMALL, ORDERS = 2_000, 16
"""Sequences x ranks of a small batch, and the shuffled orders in which its sequences are placed, too."""

IMPROVED = 4
"""The shortest starts of a small batch that are improved; of a large batch only one."""

NEAR, SHORTER = 2e-3, 5e-4
"""A plan so close to the bound is good enough. What a start must be shorter by. Both as shares, `fixed_s` left out."""

STARTS = 0.1
"""Starts after the first may take this share of the bound: TRIAL_S for each look at a rank under a target, and what
searches of micro-batches say that they have spent.
"""

NARROW, LIMITS, WIDTH, WORK = 2, 24, 8, 60_000
"""LIMITS of each micro-batch are tried, and a wide search keeps WIDTH partial plans: fewer if limits x sequences x
partial plans exceed WORK. Narrow searches after the first, and all with a least degree, try a NARROWth of the
limits."""

BUDGET, TRIAL_S, MOST = 0.02, 2e-8, 5_000
"""The improver may take this share of the bound, at TRIAL_S for each operation of a trial; and its most trials."""

SHORT_STEP_S = 0.1
"""The search takes as much time for a shorter step as for one of so many seconds."""

LARGE = 0.5
"""A batch is large if a bisection of the target, at TRIAL_S a sequence and rank, takes this share of the bound."""

REUSE = ((3e-3, 1.0), (3e-3, 0.1), (9e-3, 0.01))
"""The share by which a plan may be longer to use groups of the pool, and the waste that one group may add for it, as a
share of all ranks' time."""

MAKING = (0.05, 0.1, 0.2, 0.4, 0.7)
"""If creating a group costs `group_s`: the plan may be longer by these shares of the cost of its new groups."""

THRESHOLD, CYCLES = 0.2, 8
"""How much worse a change may make a small batch, and the cycles of the improver."""


class Timed(NamedTuple):
    """Seconds of a schedule, with those of making its groups."""

    seconds: float
    schedule: Schedule


def dhp(problem: Problem) -> Schedule:
    """The shortest schedule that is found, with groups of the pool where they make it hardly longer."""
    return reused(problem, searched(problem, improves=True)).schedule


def dhp_quick(problem: Problem) -> Schedule:
    """The shortest start: the last resort if a plan is not ready when the ranks are."""
    return searched(problem, improves=False).schedule


def searched(problem: Problem, improves: bool) -> Timed:
    """The shortest plan: of a batch as if no pack could be relieved of anything, or from a shorter start of another
    way."""
    unrelieved, *others = ways_of(problem)
    starts_of, below_s, found = rounds_of if problem.sync == "micro_batch" else orders_of, np.inf, list[Timed]()
    for whole, ways in ((unrelieved, [unrelieved]), (problem, others)):
        if ways and (starts := starts_of(problem, ways, near_s(whole), below_s)):
            starts.sort(key=seconds_of)
            found.append(starts[0])
            below_s = starts[0].seconds
            if improves and below_s > near_s(whole):
                several = starts[:IMPROVED] if is_small(problem) else starts[:1]
                found += [timed(problem, improved(whole, start.schedule, 1 / len(several))) for start in several]
    return min(found, key=seconds_of)


def near_s(problem: Problem) -> float:
    return problem.cost.fixed_s + (problem.lower_bound_s - problem.cost.fixed_s) * (1 + NEAR)


def hidden_s(problem: Problem) -> float:
    """Seconds of the step behind which planning is hidden, at least."""
    return max(problem.lower_bound_s, SHORT_STEP_S)


def seconds_of(timed: Timed) -> float:
    return timed.seconds


def reused(problem: Problem, best: Timed) -> Timed:
    """The plan of `step` with the fewest new groups among those at most a little longer (REUSE). If making groups costs
    time, the shortest of those that are longer by a share of what its new groups cost (MAKING). A large batch is left
    as it is."""
    pool, num_ranks, group_s = cached_groups_of(problem), problem.cluster.num_ranks, problem.cost.group_s
    if problem.sync == "micro_batch" or len(pool.first) == 1 or is_large(problem):
        return best
    batch, run_s = batch_of(problem), time_of(problem, best.schedule)

    def within(target_s: float, reuse_s: float) -> Timed | None:
        made = with_groups_of_the_pool(batch, target_s - problem.cost.fixed_s, pool, reuse_s)
        return timed(problem, made) if made else None

    found = [best]
    for slack, share in REUSE:
        made = within(run_s * (1 + slack), share * run_s * num_ranks)
        if made and made.seconds <= best.seconds * (1 + slack):
            found.append(made)
    best = min(found, key=lambda plan: (len(new_groups(problem, plan.schedule)), plan.seconds))
    run_s, making = time_of(problem, best.schedule), group_creation_s(problem, best.schedule)
    targets = [run_s + share * making for share in MAKING] if making > 0.0 else []
    return min([best, *filter(None, (within(each, group_s * num_ranks) for each in targets))], key=seconds_of)


def timed(problem: Problem, schedule: Schedule) -> Timed:
    return Timed(time_of(problem, schedule) + group_creation_s(problem, schedule), schedule)


def is_small(problem: Problem) -> bool:
    return len(problem.items) * problem.cluster.num_ranks <= SMALL


def is_large(problem: Problem) -> bool:
    """Whether to bisect the target would take too long beside the step that hides it."""
    bisection_s = STEPS * len(problem.items) * problem.cluster.num_ranks * TRIAL_S
    return bisection_s > LARGE * problem.lower_bound_s


def least_degrees(problem: Problem) -> list[int]:
    num_ranks = problem.cluster.num_ranks
    degrees, parts = (range(1, max(LEAST_DEGREES) + 1), num_ranks) if is_small(problem) else (LEAST_DEGREES, PARTS)
    of_parts = {num_ranks // count for count in range(1, min(parts, num_ranks) + 1)}
    return sorted({least for least in degrees if least < num_ranks} | of_parts)


def orders_of(problem: Problem, ways: list[Problem], target_s: float, best_s: float) -> list[Timed]:
    """Plans of `step`, each shorter than those before, of every way and every least degree: packs under a target
    (of a small batch also in shuffled orders); and micro-batches that run as soon as their ranks are free, whose packs
    may have several sequences on several ranks. Of a large batch these alone, once."""
    found, fixed_s, left_s = list[Timed](), problem.cost.fixed_s, STARTS * hidden_s(problem)
    best: tuple[Problem, SearchBatch, int, bool] | None = None

    def is_open(way: Problem) -> bool:
        may_start = left_s > 0 or best_s == np.inf
        return best_s > target_s and way.lower_bound_s < best_s and may_start

    def add(made: Schedule | None) -> bool:
        nonlocal best_s
        if not made or (start := timed(problem, made)).seconds >= best_s:
            return False
        found.append(start)
        best_s = start.seconds
        return True

    def under_targets(way: Problem, batch: SearchBatch, least: int, loose: bool) -> None:
        nonlocal best, left_s
        if is_open(way):
            bound_s, below_s = way.lower_bound_s - fixed_s, (best_s - fixed_s) * (1 - SHORTER)
            made, looks = shortest_under_targets(batch, bound_s, below_s, least, loose)
            left_s -= TRIAL_S * looks
            if add(made):
                best = way, batch, least, loose

    searches = [Rounds(way, way.machine) for way in ways]
    if is_large(problem):
        add(searches[0].without_barriers(1, np.inf))
        return found
    for least, each in product(least_degrees(problem), searches):
        for loose in (True, False) if least > 1 else (False,):
            under_targets(each.problem, each.batch, least, loose)
    if best and is_small(problem):
        random, batch = np.random.default_rng(0), best[1]
        for _ in range(ORDERS):
            work = batch.work * np.exp(random.normal(0.0, 0.4, len(batch.work)))
            under_targets(best[0], batch._replace(by_work=np.argsort(-work, kind="stable")), *best[2:])
    for least, each in product(least_degrees(problem), searches):
        if is_open(each.problem):
            add(each.without_barriers(least, left_s if found else np.inf))
            left_s -= each.spent_s
    return found


def rounds_of(problem: Problem, ways: list[Problem], target_s: float, best_s: float) -> list[Timed]:
    """Plans of `micro_batch`. First narrow searches, which keep one partial plan: of every way, without a least degree
    and with the one that suits each micro-batch; of the best, with one for all. Then wide ones like the plain start and
    the best, and with the degree that suits each micro-batch."""
    found = list[Timed]()
    count = int(np.clip(WORK // (2 * len(problem.items)), 4, LIMITS))
    width, left_s = int(np.clip(WORK // (count * len(problem.items)), 1, WIDTH)), STARTS * hidden_s(problem)
    fewer = max(4, count // NARROW)

    def search(rounds: Rounds, degrees: tuple[int, ...], width: int, limits: int) -> bool:
        nonlocal best_s, left_s
        if best_s <= target_s or rounds.problem.lower_bound_s >= best_s or (left_s <= 0 and found):
            return False
        below_s = problem.cost.fixed_s + (best_s - problem.cost.fixed_s) * (1 - SHORTER)
        waste = min(WASTE, best_s / problem.lower_bound_s)
        made = rounds.shortest(below_s, degrees, width, limits, waste)
        left_s -= rounds.spent_s
        if not made or (start := timed(problem, made)).seconds in [each.seconds for each in found]:
            return False
        found.append(start)
        is_best, best_s = start.seconds < best_s, min(best_s, start.seconds)
        return is_best

    searches = [rounds for each in zip(*map(rounds_on, ways)) for rounds in each]  # the plain ones of all ways first
    least = tuple(least_degrees(problem))
    plain: tuple[Rounds, tuple[int, ...]] = searches[0], (1,)
    best = plain
    for degrees, rounds in product(((1,), least), searches):
        if search(rounds, degrees, 1, count if (rounds, degrees) == plain else fewer):
            best = rounds, degrees
    for each in least[1:]:
        if search(best[0], (each,), 1, fewer):
            best = best[0], (each,)
    if width > 1:
        for rounds, degrees in dict.fromkeys((plain, best, (best[0], least))):
            search(rounds, degrees, width, count if degrees == (1,) else fewer)
    return found


def rounds_on(way: Problem) -> Iterator[Rounds]:
    """Packs on the ranks as they are: on the fastest first; if all are equal, in nodes that have room. What is left may
    take part of a micro-batch, or not. If ranks are not equal, also as if they were. If nodes matter, also on one node
    after another."""
    yield Rounds(way, way.machine)
    yield Rounds(way, way.machine, whole=False)
    if not way.machine.uniform:
        yield Rounds(way, way.nominal_machine)
    if nodes_matter(way.machine):
        yield Rounds(way, way.machine, by_node=True)


def improved(problem: Problem, start: Schedule, share: float) -> Schedule:
    """A plan after the improver, which has a share of the trials."""
    batch = batch_of(problem)._replace(capacity=problem.cluster.most_tokens_per_rank)
    slots, packs = int(start.micro_batch[-1]) + 1, len(start.micro_batch)
    ranks = len(start.ranks)
    operations = 100.0 + (4.0 * packs / slots if batch.lockstep else 2 * packs + ranks + 3 * len(batch.speeds))
    operations += 20.0 * len(problem.all_image_s) / packs * ranks / packs
    trials = int(min(MOST, BUDGET * hidden_s(problem) / (TRIAL_S * operations)))
    if trials < packs:
        return start
    trials = int(share * trials)
    state = state_of(batch, start)
    improve(batch, state, near_s(problem) - (0.0 if batch.lockstep else batch.fixed_s), trials,
            *((CYCLES, THRESHOLD) if is_small(problem) else (4, 0.0)))
    return schedule_of(batch, state)
