"""The planner of dhp_ray: the schedule of its mode, or a baseline's schedule if that is shorter, with packs that fill
memory or a little less. If a rank holds few sequences, fuller packs leave ranks waiting.

Near the lower bound no baseline can be much better, so baselines are tried only if the plan is farther from it, or the
batch is small. (For a huge batch they would take seconds.) They are tried at two pack caps, above MANY at one. If one
of a larger batch is then about as short as the result of the search, and that is far from the bound, baselines are
tuned, each to its best cap: as many of them as take a small share of the step, since planning runs during the previous
step. (With sync=micro_batch two caps do not show how short a baseline can be.)

The shortest of all these schedules are then improved by exchanges between their packs; with sync=step only if they are
far from the bound.

If packs may move activations to host memory, all of this is done twice. The second time every sequence has enough ranks
that its copies are hidden; the first time it may have fewer. So no plan is longer than without offload. A small batch,
in which one pack more may mean one micro-batch more, is planned a third time with packs that wait for copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.baselines.megatron import megatron
from dhp_ray.planner.baselines.pack_cap import cap_of_rounds
from dhp_ray.planner.baselines.paper import dhp_paper, paper_at
from dhp_ray.planner.baselines.pow2 import packed_to, pow2
from dhp_ray.planner.baselines.static_best import static_best
from dhp_ray.planner.micro_batch.exchanges import with_exchanges
from dhp_ray.planner.micro_batch.search import dhp_micro_batch, node_after_node
from dhp_ray.planner.pricing import making_s, time_of
from dhp_ray.planner.problem import Problem, without_waits
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.step.critical_path import with_shorter_path
from dhp_ray.planner.step.search import dhp_step

NEAR, SMALL, MANY, HUGE = 1e-2, 10_000, 5_000_000, 20_000
"""A plan of more than SMALL sequences x ranks is compared with the baselines if it is more than NEAR (a share) above
the bound, up to MANY also with less full packs, of one round more. A plan of more than HUGE sequences is not compared.
"""

TUNING = ((pow2, 7e-5), (dhp_paper, 7e-5), (megatron, 5e-5), (static_best, 3e-4))
"""The baselines, and approximately how many seconds for each sequence it takes to tune them."""

CLOSE, FAR, HIDDEN = 1e-2, 3e-2, 0.15
"""A plan of more than SMALL sequences x ranks (up to MANY, on equal ranks) is compared with tuned baselines if it is
more than FAR above the bound and, in step, a baseline at two caps is at most CLOSE longer: with as many of TUNING as
take at most HIDDEN of a step. (With `encoder=auto` each of the two plans does that.)
"""


EXCHANGED = 3
"""Up to MANY sequences x ranks: the number of schedules that exchanges between packs improve. With sync=step only those
that are more than NEAR above the bound.
"""


class Timed(NamedTuple):
    """A schedule, its seconds including the creation of its groups, and whether it is a baseline's."""

    seconds: float
    schedule: Schedule
    is_baseline: bool = False


def dhp(problem: Problem, tunes: bool = True) -> Schedule:
    """The shortest schedule found. `tunes`: there is time to tune the baselines."""
    problems = [problem, *without_waits(problem)]
    cluster = problem.cluster
    if (problem.machine.tokens_per_rank < cluster.most_tokens_per_rank
            and len(problem.samples) * cluster.num_ranks <= SMALL):
        problems.append(replace(problem, joins_most=True))
    found = [timed for each in problems for timed in _timed(each)]
    if tunes and _worth_tuning(problem, _shortest(found), [timed for timed in found if timed.is_baseline]):
        seconds = np.cumsum([len(problem.samples) * seconds for _, seconds in TUNING])
        found += [_with_time(problem, baseline(problem)) for (baseline, _), end_s in zip(TUNING, seconds)
                  if end_s <= HIDDEN * _shortest(found).seconds]
    if len(problem.samples) * cluster.num_ranks <= MANY:
        found += [_with_time(problem, _exchanged(problem, timed.schedule))
                  for timed in sorted(found, key=lambda timed: timed.seconds)[:EXCHANGED]
                  if problem.sync == "micro_batch" or not _is_near(problem, timed.seconds)]
    return _shortest(found).schedule


def _exchanged(problem: Problem, schedule: Schedule) -> Schedule:
    exchanged = with_exchanges if problem.sync == "micro_batch" else with_shorter_path
    return exchanged(problem, schedule)


def _is_near(problem: Problem, seconds: float) -> bool:
    fixed_s = problem.cost.fixed_s
    return seconds - fixed_s <= (problem.lower_bound_s - fixed_s) * (1 + NEAR)


def _with_time(problem: Problem, schedule: Schedule) -> Timed:
    return Timed(time_of(problem, schedule) + making_s(problem, schedule), schedule)


def _shortest(found: Sequence[Timed]) -> Timed:
    return min(found, key=lambda timed: timed.seconds)


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
        times += [time_of(problem, schedule) for schedule in schedules[len(times) :]]
    return [Timed(time + making_s(problem, schedule), schedule, place >= num_found)
            for place, (time, schedule) in enumerate(zip(times, schedules))]
