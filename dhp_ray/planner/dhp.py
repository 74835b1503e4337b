"""The planner of dhp_ray: the schedule of its mode, or a baseline's schedule if that is shorter, with packs that fill
memory or a little less. If a rank holds few sequences, fuller packs leave ranks waiting.

If the plan is far from the lower bound, plans are also made whose packs have at least two, three, ... ranks
(LEAST_DEGREES). Near the bound no baseline can be much better, so baselines are tried only if the plan is farther from
it, or the batch is small. (For a huge batch they would take seconds.) They are tried at two pack caps, above MANY at
one.

The shortest of all these schedules are then improved by exchanges between their packs; with sync=step only if they are
far from the bound. With sync=micro_batch exchanges are compared for a small share of the step at most.

If packs may move activations to host memory or recompute layers, all of this is done for each of several ways to plan
the batch (`ways.py`), one of which moves and recomputes nothing that sequences can do without: so no plan is longer
than without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.baselines.pack_cap import cap_of_rounds
from dhp_ray.planner.baselines.paper import paper_at
from dhp_ray.planner.baselines.pow2 import packed_to
from dhp_ray.planner.micro_batch.exchanges import with_exchanges
from dhp_ray.planner.micro_batch.search import dhp_micro_batch, micro_batch_of_least_degree, node_after_node
from dhp_ray.planner.parts import EFFORT
from dhp_ray.planner.pricing import making_s, time_of
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.step.critical_path import with_shorter_path
from dhp_ray.planner.step.search import dhp_step
from dhp_ray.planner.ways import SMALL, Way, few_ways, ways_of

NEAR, MANY, HUGE = 1e-2, 5_000_000, 20_000
"""A plan of more than SMALL sequences x ranks is compared with the baselines if it is more than NEAR (a share) above
the bound, up to MANY also with less full packs, of one round more. A plan of more than HUGE sequences is not compared.
"""

LEAST_DEGREES = (2, 3, 4, 6, 8)
"""Plans that are more than NEAR above the bound are also made with packs of at least so many ranks: sequences of 4,505
tokens leave almost half of a rank that holds 8,192 unused, but five ranks hold nine of them. (Up to MANY sequences x
ranks.)
"""

EXCHANGED = 3
"""Up to MANY sequences x ranks: the number of schedules that exchanges between packs improve, of each way to plan the
batch. With sync=step only those that are more than NEAR above the bound.
"""

EXCHANGING, COMPARED_S = 0.2, 1e-8
"""With sync=micro_batch, and more than SMALL sequences x ranks, exchanges are compared for at most the share EXCHANGING
of a step, approximately COMPARED_S each, in the shortest schedule first. (With `encoder=auto` each of the two plans
does that.)
"""


class Timed(NamedTuple):
    """A schedule, and its seconds including the creation of its groups."""

    seconds: float
    schedule: Schedule


def dhp(problem: Problem) -> Schedule:
    """The shortest schedule found."""
    size, by_way = len(problem.samples) * problem.cluster.num_ranks, list[tuple[Way, list[Timed]]]()
    for way in few_ways(problem) if size > MANY else ways_of(problem):
        if not by_way or way.searched.lower_bound_s < _shortest(_all(by_way)).seconds:
            by_way.append((way, _found(way, problem)))
    found = _all(by_way)
    if size <= MANY:
        found += list(_with_exchanges(problem, by_way))
    return _shortest(found).schedule


def _found(way: Way, problem: Problem) -> list[Timed]:
    """Schedules of a way to plan a batch, with their seconds in the batch."""
    found = _timed(way.searched)
    if way.searched is way.exchanged:
        return found
    shortest = sorted(found, key=_seconds)[:EXCHANGED]
    return [_with_time(problem, timed.schedule) for timed in shortest]


def _all(by_way: Sequence[tuple[Way, list[Timed]]]) -> list[Timed]:
    return [timed for _, own in by_way for timed in own]


def _with_exchanges(problem: Problem, by_way: Sequence[tuple[Way, list[Timed]]]) -> Iterator[Timed]:
    """The shortest schedules of each way after exchanges between their packs."""
    chosen = sorted(((timed, way) for way, own in by_way for timed in sorted(own, key=_seconds)[:EXCHANGED]),
                    key=lambda pair: pair[0].seconds)
    large = len(problem.samples) * problem.cluster.num_ranks > SMALL
    left = EXCHANGING * chosen[0][0].seconds / COMPARED_S if large else np.inf
    for timed, way in chosen:
        if problem.sync == "step":
            if not _is_near(problem, timed.seconds):
                yield _with_time(problem, with_shorter_path(way.exchanged, timed.schedule))
        elif left > 0.0:
            schedule, compared = with_exchanges(way.exchanged, timed.schedule, min(left, EFFORT))
            left -= compared
            yield _with_time(problem, schedule)


def with_least_degrees(problem: Problem, shortest_s: float) -> list[Schedule]:
    """Plans whose packs have at least so many ranks: all ranks of a small batch, and each of LEAST_DEGREES; with
    sync=step only those that may be shorter than `shortest_s` and the ones before.
    """
    num_ranks, schedules = problem.cluster.num_ranks, list[Schedule]()
    size, fewer = len(problem.items) * num_ranks, [least for least in LEAST_DEGREES if least < num_ranks]
    if size > MANY or num_ranks == 1:
        return []
    for least in ([num_ranks] if size <= SMALL else []) + fewer:
        if problem.sync == "micro_batch":
            schedules += micro_batch_of_least_degree(problem, least)
            continue
        items = problem.items.copy()  # type: ignore[attr-defined]
        items.minimum_degree = np.maximum(items.minimum_degree, least)
        made = dhp_step(replace(problem, items=items), shortest_s)
        schedules += made
        shortest_s = min([shortest_s, *(time_of(problem, schedule) for schedule in made)])
    return schedules


def _is_near(problem: Problem, seconds: float) -> bool:
    fixed_s = problem.cost.fixed_s
    return seconds - fixed_s <= (problem.lower_bound_s - fixed_s) * (1 + NEAR)


def _with_time(problem: Problem, schedule: Schedule) -> Timed:
    return Timed(time_of(problem, schedule) + making_s(problem, schedule), schedule)


def _seconds(timed: Timed) -> float:
    return timed.seconds


def _shortest(found: Sequence[Timed]) -> Timed:
    return min(found, key=_seconds)


def _timed(problem: Problem) -> list[Timed]:
    """Schedules of a batch."""
    schedules = dhp_micro_batch(problem) if problem.sync == "micro_batch" else dhp_step(problem)
    times = [time_of(problem, schedule) for schedule in schedules]
    near, count = _is_near(problem, min(times)), len(problem.samples)
    if count <= HUGE and (not near or count * problem.cluster.num_ranks <= SMALL):
        if not near:
            if problem.sync == "micro_batch":
                schedules += node_after_node(problem, schedules[0])
            schedules += with_least_degrees(problem, min(times))
        memory = problem.cluster.tokens_per_rank
        fewer = max(1, int(cap_of_rounds(problem, memory, 1)))
        for cap in [memory, fewer] if count * problem.cluster.num_ranks <= MANY else [memory]:
            schedules += [*packed_to(problem, cap), paper_at(problem, cap, memory)]
        times += [time_of(problem, schedule) for schedule in schedules[len(times) :]]
    return [Timed(time + making_s(problem, schedule), schedule) for time, schedule in zip(times, schedules)]
