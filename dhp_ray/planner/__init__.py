"""Plans a global batch: which sequences run together, on which ranks, in which order.

    samples -> problem_of -> a planner of PLANNERS -> schedule -> priced (cost, encoders, timeline, bound) -> Plan
    the same with images encoded apart from the packs (`world`) -> Plan                        the shorter one is taken

It is a pure function of its arguments: the same batch, speeds, costs and pool give the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from dhp_ray.planner.baselines.megatron import megatron
from dhp_ray.planner.baselines.paper import dhp_paper
from dhp_ray.planner.baselines.pow2 import pow2
from dhp_ray.planner.baselines.static import Layout, best_layout, static, static_best, uniform
from dhp_ray.planner.bound import bounded
from dhp_ray.planner.cost.model import SYNCS, CostModel
from dhp_ray.planner.encoder.world import World, without_images, world_of
from dhp_ray.planner.errors import PlanError, SequenceTooLongError
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import IN_PACKS, Plan, Sample, of_json
from dhp_ray.planner.problem import ENCODERS, Problem, neighbours, problem_of, reordered
from dhp_ray.planner.schedule import Schedule, renamed
from dhp_ray.planner.search.plan import dhp, dhp_quick
from dhp_ray.planner.timeline import (
    PackTimes,
    group_creation_s,
    groups_of,
    idle_fraction,
    makespan_of,
    plan_starts,
    starts_of,
    times_of,
)

__all__ = [
    "LAST_RESORT",
    "PLANNERS",
    "ClusterSpec",
    "CostModel",
    "Plan",
    "PlanError",
    "Sample",
    "SequenceTooLongError",
    "checked_problem",
    "idle_fraction",
    "plan_batch",
    "plan_data_set",
    "plan_starts",
    "plan_uniform",
    "recorded_inputs",
    "replay",
    "starts_of",
    "static_layout",
    "warm_up",
]

PLANNERS: dict[str, Callable[[Problem], Schedule]] = {
    "dhp": dhp,
    "dhp_paper": dhp_paper,
    "static": static,
    "static_best": static_best,
    "pow2": pow2,
    "megatron": megatron,
    "dhp_quick": dhp_quick,
}

LAST_RESORT = "dhp_quick"
"""The planner to use when time is up, no choice of users: `dhp` without its improver and its preference for groups of
the pool. Valid for every batch that can be planned at all."""

GAIN = 1e-3
"""`auto` makes a plan with images apart from the packs only if that plan could be shorter by more than this share, with
its packs at their lower bound and its images dealt out evenly.
"""


def plan_batch(
    samples: Sequence[Sample],
    cluster: ClusterSpec,
    cost: CostModel,
    *,
    planner: str = "dhp",
    sync: str = "step",
    pool: Sequence[tuple[int, ...]] = (),
    encoder: str = "group",
) -> Plan:
    """Plan one global batch and validate the plan. A pure function, which needs neither torch nor Ray.

        cost = CostModel.load("conf/cost/cuda.yaml")
        plan = plan_batch([Sample("a", 9000), Sample("b", 80)], ClusterSpec(4, 4, 4096), cost)
        [(group.ranks, group.sequences) for group in plan.groups]    # rows of `samples`; groups as they begin

    samples: in the batch's order; a sample's tokens are integers, with text and vision counted separately.
    cluster: ranks, ranks of a node (or the node of each rank), tokens that a rank holds of one pack, the ranks' speeds
    (1.0: nominal; none: all nominal), and the share of a larger pack's layers whose activations go to host memory
    (`Offload`), or that are recomputed (`Recomputation`).
    cost: seconds and bytes of work and messages, from conf/cost/ or from your own measurements. All times of the plan
    are predicted with it.
    planner: a name of PLANNERS. sync: `step`, ranks meet once a step, or `micro_batch`, all meet in every micro-batch.
    pool: the existing process groups, least recently used first; they are used again if that makes the plan hardly
    longer.
    encoder: `group`, images are encoded in the packs; `world`, apart from them if memory allows, by any rank; `auto`:
    the shorter plan of the two.
    SequenceTooLongError: a sequence does not fit the whole cluster. PlanError: no sequences, one without tokens, an
    unknown planner, mode or place for the encoder.
    """
    begin = time.perf_counter()
    problem = checked_problem(samples, cluster, cost, planner=planner, sync=sync, pool=pool, encoder=encoder)
    plan = _shortest(problem, planner, PLANNERS[planner])
    return replace(plan, planning_time_s=time.perf_counter() - begin)


def plan_data_set(problems: Sequence[Problem]) -> list[Plan]:
    """Plans of all batches of a data set (`checked_problem`'s, on equal clusters) under one static layout, as static
    systems run (`static_layout`): one degree and one pack cap. These plans have the name `static` and do
    not replay, since each depends on all batches.
    """
    problems = [bounded(problem) for problem in problems]
    layout = static_layout(problems)
    return [plan_uniform(problem, layout) for problem in problems]


def static_layout(problems: Sequence[Problem]) -> Layout:
    """The layout that is best for all of these batches together, with images where the problems say. `auto`: of the
    best layouts for packs with images and for packs without, the one whose plans are shorter in sum.
    """
    places = {problem.encoder for problem in problems if len(problem.all_image_s)} or {"group"}
    seen = [problems] if places != {"world"} else []
    seen += [[without_images(problem) for problem in problems]] if places != {"group"} else []
    layouts = [best_layout([_in_node_order(problem)[0] for problem in each]) for each in seen]
    if len(layouts) == 1:
        return layouts[0]
    return min(layouts, key=lambda layout: sum(plan_uniform(problem, layout).predicted_time_s for problem in problems))


def plan_uniform(problem: Problem, layout: Layout) -> Plan:
    """The plan of a batch under a given layout, with images in the packs or apart from them as `problem.encoder` says.
    """
    begin = time.perf_counter()
    plan = _shortest(problem, "static", lambda seen: uniform(seen, layout))
    return replace(plan, planning_time_s=time.perf_counter() - begin)


class _Candidate(NamedTuple):
    """A priced schedule of packs, before it becomes a plan. `group_creation_s`: seconds until its missing process
    groups are made. `world`: the ranks that encode the images of the batch, if that is apart from the packs.
    """

    schedule: Schedule
    times: PackTimes
    makespan_s: float
    group_creation_s: float
    world: World | None = None


def _shortest(problem: Problem, name: str, planner: Callable[[Problem], Schedule]) -> Plan:
    """The plan with images in the packs or apart from them, whichever is shorter including the creation of its process
    groups; in the packs if both are equal. The plan with images apart is not made if it could hardly be shorter.
    """
    problem, found = problem if problem.lower_bound_s else bounded(problem), list[_Candidate]()
    apart = problem.encoder != "group" and len(problem.all_image_s) > 0
    if problem.encoder != "world" or not apart:
        found.append(_in_packs(problem, planner))
    if apart:
        without = bounded(without_images(problem))
        least_s = problem.lower_bound_s
        if problem.sync == "micro_batch":  # all ranks encode before all run packs
            least_s = without.lower_bound_s + float(problem.all_image_s.sum() / problem.speeds.sum())
        if not found or found[0].makespan_s + found[0].group_creation_s > least_s * (1 + GAIN):
            found += _apart(problem, without, planner)
    if not found:
        found.append(_in_packs(problem, planner))
    return _plan(problem, name, min(found, key=lambda candidate: candidate.makespan_s + candidate.group_creation_s))


def _in_packs(problem: Problem, planner: Callable[[Problem], Schedule]) -> _Candidate:
    seen = problem if problem.encoder == "group" else bounded(replace(problem, encoder="group"))
    seen, order = _in_node_order(seen)
    return _priced(problem, planner(seen), order)


def _apart(problem: Problem, without: Problem, planner: Callable[[Problem], Schedule]) -> list[_Candidate]:
    """The candidate with images apart from the packs; none if the ranks have no memory for that. `without`: the batch
    without its images, with its bound.
    """
    seen, order = _in_node_order(without)
    packs = _priced(without, planner(seen), order)
    world = world_of(problem, packs.schedule, packs.times.pack_s)
    if world is None:
        return []
    return [packs._replace(makespan_s=world.makespan_s, world=world)]


def _in_node_order(problem: Problem) -> tuple[Problem, np.ndarray | None]:
    """The problem as planners see it, with the ranks of a node as neighbours, and the order of its ranks that achieves
    this (None if they are neighbours already).
    """
    order = neighbours(problem.cluster.nodes)
    return (problem, None) if order is None else (reordered(problem, order), order)


def _priced(problem: Problem, schedule: Schedule, order: np.ndarray | None) -> _Candidate:
    """A schedule of ranks in this order, mapped back to the cluster's ranks and priced."""
    schedule = schedule if order is None else renamed(schedule, order)
    times = times_of(problem, schedule)
    return _Candidate(schedule, times, makespan_of(problem, schedule, times), group_creation_s(problem, schedule))


def _plan(problem: Problem, planner: str, found: _Candidate) -> Plan:
    """The plan of a candidate, validated."""
    cluster = problem.cluster
    inputs: dict[str, Any] = {
        "speeds": list(cluster.speeds),
        "nodes": list(cluster.nodes),
        "cost": problem.cost.to_json(),
        "pool": [list(ranks) for ranks in problem.pool],
        "encoder": problem.encoder,
        "offload": asdict(cluster.offload),
        "recomputation": asdict(cluster.recomputation),
    }
    world = found.world
    images, passes, vision = (world.images, world.passes, world.vision) if world else (None, None, IN_PACKS)
    groups = groups_of(problem, found.schedule, found.times, images, passes)
    update_s = problem.cost.update_s if problem.sync == "micro_batch" else 0.0  # whatever the plan is
    plan = Plan(planner, problem.sync, cluster, problem.samples, groups, found.makespan_s + update_s,
                problem.lower_bound_s + update_s, 0.0, inputs, vision)
    plan.validate()
    return plan


def checked_problem(
    samples: Sequence[Sample],
    cluster: ClusterSpec,
    cost: CostModel,
    *,
    planner: str = "dhp",
    sync: str = "step",
    pool: Sequence[tuple[int, ...]] = (),
    encoder: str = "group",
) -> Problem:
    """The problem that `plan_batch` plans. It refuses the same batches with the same errors, at once, without compiling
    anything.
    """
    if planner not in PLANNERS:
        raise PlanError(f"planner: got {planner!r}; allowed: {', '.join(PLANNERS)}")
    if sync not in SYNCS:
        raise PlanError(f"sync: got {sync!r}; allowed: {', '.join(SYNCS)}")
    if encoder not in ENCODERS:
        raise PlanError(f"encoder: got {encoder!r}; allowed: {', '.join(ENCODERS)}")
    return problem_of(samples, cluster, cost, sync, pool, encoder)


def warm_up() -> float:
    """Compile the loops (in a thread, while workers start); return the seconds that it took. Planning before that
    compiles what it needs by itself.
    """
    begin = time.perf_counter()
    cost = CostModel(1e-9, 1e-4, 1e5, 0.1, {2: 1e10}, vision_linear_s=1e-4)
    samples = [Sample(str(length), length, 0, ((1, 2, 2),)) for length in (30, 7, 5)]
    for sync in SYNCS:
        for speeds in ((), (1.0, 1.0, 1.0, 0.5)):
            plan_batch(samples, ClusterSpec(4, 4, 10, speeds), cost, sync=sync, encoder="auto")
    for planner, sync in product(PLANNERS, SYNCS):
        plan_batch(samples, ClusterSpec(4, 4, 10), cost, planner=planner, sync=sync)
    return time.perf_counter() - begin


def replay(tree: dict[str, Any]) -> Plan:
    """Plan again from the inputs of a plan file (`Plan.to_json`)."""
    return plan_batch(**recorded_inputs(tree))


def recorded_inputs(tree: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `plan_batch` that made a plan file."""
    try:
        inputs = tree["inputs"]
        found = {
            "samples": of_json(inputs["samples"], tuple[Sample, ...]),
            "cluster": of_json(inputs | tree, ClusterSpec),
            "cost": CostModel.from_json(inputs["cost"]),
            "planner": tree["planner"],
            "sync": tree["sync"],
            "pool": [tuple(ranks) for ranks in inputs["pool"]],
            "encoder": inputs.get("encoder", "group"),
        }
        checked_problem(**found)
        return found
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"plan file: no usable inputs ({error.__class__.__name__}: {error}); it does not replay"
        ) from None
