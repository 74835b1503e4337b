"""The planner of dhp_ray: the schedule of its mode, or a baseline's schedule if that is shorter, with packs that fill
memory or a little less. If a rank holds few sequences, fuller packs leave ranks waiting.

Near the lower bound no baseline can be much better, so baselines are tried only if the plan is farther from it, or the
batch is small. (For a huge batch they would take seconds.) They are tried at two pack caps, above MANY at one. If one
of a larger batch is then about as short as the result of the search, and that is far from the bound, baselines are
tuned, each to its best cap: as many of them as take a small share of the step, since planning runs during the previous
step. (With sync=micro_batch two caps do not show how short a baseline can be.)

The shortest of all these schedules are then improved by exchanges between their packs; with sync=step only if they are
far from the bound. With sync=micro_batch exchanges are compared for a small share of the step at most.

If packs may move activations to host memory or recompute layers, all of this is done for each of several ways to plan
the batch (`ways.py`), one of which moves and recomputes nothing that sequences can do without: so no plan is longer
than without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.baselines.megatron import megatron
from dhp_ray.planner.baselines.pack_cap import cap_of_rounds
from dhp_ray.planner.baselines.paper import dhp_paper, paper_at
from dhp_ray.planner.baselines.pow2 import packed_to, pow2
from dhp_ray.planner.baselines.static_best import static_best
from dhp_ray.planner.micro_batch.exchanges import with_exchanges
from dhp_ray.planner.micro_batch.search import dhp_micro_batch, node_after_node
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

TUNING = {"step": ((pow2, 7e-5), (dhp_paper, 7e-5), (megatron, 5e-5), (static_best, 3e-4)),
          "micro_batch": ((megatron, 5e-5), (dhp_paper, 7e-5), (static_best, 3e-4), (pow2, 1e-3))}
"""By mode, the baselines in the order in which they are tuned, and approximately how many seconds each takes for each
sequence. (With sync=micro_batch `pow2` tunes seven or eight plans. A short step has time for one baseline alone.)
"""

CLOSE, FAR, HIDDEN = 2e-2, 2e-2, 0.15
"""A plan of more than SMALL sequences x ranks (up to MANY, on equal ranks) is compared with tuned baselines if it is
more than FAR above the bound and, in step, a baseline at two caps is at most CLOSE longer: with as many of TUNING as
take at most HIDDEN of a step. (With `encoder=auto` each of the two plans does that.)
"""


EXCHANGED = 3
"""Up to MANY sequences x ranks: the number of schedules that exchanges between packs improve, of each way to plan the
batch and of tuned baselines. With sync=step only those that are more than NEAR above the bound.
"""

EXCHANGING, COMPARED_S = 0.2, 1e-8
"""With sync=micro_batch, and more than SMALL sequences x ranks, exchanges are compared for at most the share EXCHANGING
of a step, approximately COMPARED_S each, in the shortest schedule first. (With `encoder=auto` each of the two plans
does that.)
"""


class Timed(NamedTuple):
    """A schedule, its seconds including the creation of its groups, and whether it is a baseline's."""

    seconds: float
    schedule: Schedule
    is_baseline: bool = False


def dhp(problem: Problem, tunes: bool = True) -> Schedule:
    """The shortest schedule found. `tunes`: there is time to tune the baselines."""
    size, by_way = len(problem.samples) * problem.cluster.num_ranks, list[tuple[Way, list[Timed]]]()
    for way in few_ways(problem) if size > MANY else ways_of(problem):
        if not by_way or way.searched.lower_bound_s < _shortest(_all(by_way)).seconds:
            by_way.append((way, _found(way, problem)))
    if tunes and _worth_tuning(problem, _shortest(_all(by_way)), [each for each in _all(by_way) if each.is_baseline]):
        tuning = TUNING[problem.sync]
        end_s = np.cumsum([len(problem.samples) * seconds for _, seconds in tuning])
        limit_s = HIDDEN * _shortest(_all(by_way)).seconds
        by_way.append((Way(problem, problem), [_with_time(problem, baseline(problem))
                                               for (baseline, _), each_s in zip(tuning, end_s) if each_s <= limit_s]))
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
    return [_with_time(problem, timed.schedule)._replace(is_baseline=timed.is_baseline) for timed in shortest]


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


def _is_near(problem: Problem, seconds: float) -> bool:
    fixed_s = problem.cost.fixed_s
    return seconds - fixed_s <= (problem.lower_bound_s - fixed_s) * (1 + NEAR)


def _with_time(problem: Problem, schedule: Schedule) -> Timed:
    return Timed(time_of(problem, schedule) + making_s(problem, schedule), schedule)


def _seconds(timed: Timed) -> float:
    return timed.seconds


def _shortest(found: Sequence[Timed]) -> Timed:
    return min(found, key=_seconds)


def _worth_tuning(problem: Problem, best: Timed, baselines: Sequence[Timed]) -> bool:
    fixed_s, count = problem.cost.fixed_s, len(problem.samples)
    if not (baselines and problem.machine.uniform and SMALL < count * problem.cluster.num_ranks <= MANY):
        return False
    far = best.seconds - fixed_s > (problem.lower_bound_s - fixed_s) * (1 + FAR)
    close = problem.sync == "micro_batch" or _shortest(baselines).seconds <= best.seconds * (1 + CLOSE)
    return far and close


def _timed(problem: Problem) -> list[Timed]:
    """Schedules of a batch."""
    schedules = dhp_micro_batch(problem) if problem.sync == "micro_batch" else dhp_step(problem)
    times = [time_of(problem, schedule) for schedule in schedules]
    near, count, num_found = _is_near(problem, min(times)), len(problem.samples), len(schedules)
    if count <= HUGE and (not near or count * problem.cluster.num_ranks <= SMALL):
        if problem.sync == "micro_batch" and not near:
            schedules += node_after_node(problem, schedules[0])
            num_found = len(schedules)
        memory = problem.cluster.tokens_per_rank
        fewer = max(1, int(cap_of_rounds(problem, memory, 1)))
        for cap in [memory, fewer] if count * problem.cluster.num_ranks <= MANY else [memory]:
            schedules += [*packed_to(problem, cap), paper_at(problem, cap, memory)]
        if not near and count * problem.cluster.num_ranks <= SMALL:
            schedules.append(static_best(problem))  # on few ranks, one more each may be one round of packs less
        times += [time_of(problem, schedule) for schedule in schedules[len(times) :]]
    return [Timed(time + making_s(problem, schedule), schedule, place >= num_found)
            for place, (time, schedule) in enumerate(zip(times, schedules))]
