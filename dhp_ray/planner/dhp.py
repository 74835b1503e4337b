"""The planner of dhp_ray: the schedule of its mode, or a baseline's plan where that is better, packed to memory or
a little below: where a rank holds few sequences, fuller packs leave ranks waiting.

Near the lower bound no baseline can be better by much, so the baselines are asked only where the plan is farther from
it, or the batch is small. (Of a huge batch they would take seconds.) They are asked at two pack caps. A larger batch
whose plan is far from the bound is compared with every baseline at its best cap, where that takes a small share of the
step: planning runs beside the step before. Where a rank holds few sequences at a time, the cap decides.

Where packs may move activations to host memory, all of this is done twice: the second time no sequence has fewer ranks
than it takes for its copies to be hidden, which the first time it may have. So no plan is longer than without. A small
batch, of which one pack more may be a micro-batch more, is planned once more with packs that wait for copies.
"""

from __future__ import annotations

from dataclasses import replace

from dhp_ray.planner.baselines.megatron import megatron
from dhp_ray.planner.baselines.pack_cap import cap_of_rounds
from dhp_ray.planner.baselines.paper import dhp_paper, paper_at
from dhp_ray.planner.baselines.pow2 import packed_to, pow2
from dhp_ray.planner.baselines.static_best import static_best
from dhp_ray.planner.micro_batch.search import dhp_micro_batch, node_after_node
from dhp_ray.planner.pricing import making_s, time_of
from dhp_ray.planner.problem import Problem, without_waits
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.step.search import dhp_step

NEAR, SMALL, MANY, HUGE = 1e-2, 10_000, 5_000_000, 20_000
"""A plan of more than SMALL sequences x ranks is compared with the baselines if it is more than NEAR (a share) above
the bound, up to MANY also with their packs of one round more, less full; one of more than HUGE sequences is not."""

FAR, TUNING_S, HIDDEN = 3e-2, 5e-4, 0.15
"""A plan of more than SMALL sequences x ranks (up to MANY, on equal ranks) that is more than FAR above the bound is
compared with all tuned baselines, if tuning, about TUNING_S a sequence, takes at most the share HIDDEN of the step."""


def dhp(problem: Problem, tunes: bool = True) -> Schedule:
    """`tunes`: there is time to tune the baselines."""
    problems = [problem, *without_waits(problem)]
    cluster = problem.cluster
    if (problem.machine.tokens_per_rank < cluster.most_tokens_per_rank
            and len(problem.samples) * cluster.num_ranks <= SMALL):
        problems.append(replace(problem, joins_most=True))
    found = [timed for each in problems for timed in _timed(each)]
    if tunes and _worth_tuning(problem, min(found, key=lambda timed: timed[0])[0]):
        schedules = [baseline(problem) for baseline in (pow2, dhp_paper, static_best, megatron)]
        found += [(time_of(problem, schedule) + making_s(problem, schedule), schedule) for schedule in schedules]
    return min(found, key=lambda timed: timed[0])[1]


def _worth_tuning(problem: Problem, makespan_s: float) -> bool:
    fixed_s, count = problem.cost.fixed_s, len(problem.samples)
    return (problem.machine.uniform and SMALL < count * problem.cluster.num_ranks <= MANY
            and TUNING_S * count <= HIDDEN * makespan_s
            and makespan_s - fixed_s > (problem.lower_bound_s - fixed_s) * (1 + FAR))


def _timed(problem: Problem) -> list[tuple[float, Schedule]]:
    """Schedules of a batch, each with its seconds and those of making its groups."""
    schedules = dhp_micro_batch(problem) if problem.sync == "micro_batch" else dhp_step(problem)
    times, fixed_s = [time_of(problem, schedule) for schedule in schedules], problem.cost.fixed_s
    near = min(times) - fixed_s <= (problem.lower_bound_s - fixed_s) * (1 + NEAR)
    count = len(problem.samples)
    if count <= HUGE and (not near or count * problem.cluster.num_ranks <= SMALL):
        memory = problem.cluster.tokens_per_rank
        fewer = max(1, int(cap_of_rounds(problem, memory, 1)))
        for cap in [memory, fewer] if count * problem.cluster.num_ranks <= MANY else [memory]:
            schedules += [*packed_to(problem, cap), paper_at(problem, cap, memory)]
        if problem.sync == "micro_batch" and not near:
            schedules += node_after_node(problem, schedules[0])
        times += [time_of(problem, schedule) for schedule in schedules[len(times) :]]
    return [(time + making_s(problem, schedule), schedule) for time, schedule in zip(times, schedules)]
