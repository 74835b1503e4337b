"""Plans a global batch: which sequences run together, on which ranks, in which order.

    samples -> problem_of -> a planner of PLANNERS -> schedule -> priced (cost, encoders, timeline, bound) -> Plan

A pure function of its arguments: same batch, speeds, costs and pool, same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dhp_ray.planner.bound import lower_bound_s
from dhp_ray.planner.cost import SYNCS, CostModel
from dhp_ray.planner.dhp import dhp
from dhp_ray.planner.neighbours import neighbours, renamed, reordered
from dhp_ray.planner.paper import dhp_paper
from dhp_ray.planner.plan import ClusterSpec, Plan, PlanError, Sample, SequenceTooLongError, samples_from_json
from dhp_ray.planner.pow2 import pow2
from dhp_ray.planner.pricing import groups_of, makespan_of, times_of
from dhp_ray.planner.problem import Problem, problem_of
from dhp_ray.planner.quick import dhp_quick
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.static import static
from dhp_ray.planner.static_best import static_best
from dhp_ray.planner.timeline import idle_fraction, starts_of

__all__ = ["LAST_RESORT", "PLANNERS", "ClusterSpec", "CostModel", "Plan", "PlanError", "Sample", "SequenceTooLongError", "idle_fraction", "plan_batch",
           "replay", "starts_of", "warm_up"]

PLANNERS: dict[str, Callable[[Problem], Schedule]] = {
    "dhp": dhp, "dhp_paper": dhp_paper, "static": static, "static_best": static_best, "pow2": pow2, "dhp_quick": dhp_quick}

LAST_RESORT = "dhp_quick"
"""The planner for when there is no time for another: milliseconds at any size, balanced, and valid wherever the batch can be planned at all."""


def plan_batch(samples: Sequence[Sample], cluster: ClusterSpec, cost: CostModel, *, planner: str = "dhp", sync: str = "step",
               pool: Sequence[tuple[int, ...]] = ()) -> Plan:
    """The plan of one global batch, validated: a pure function, which needs neither torch nor Ray.

        plan = plan_batch([Sample("a", 9000), Sample("b", 80)], ClusterSpec(4, 4, 4096), CostModel.load("conf/cost/cuda.yaml"))
        [(group.ranks, group.pack.sequences) for group in plan.groups]    # rows of `samples`, in the order in which the groups begin

    samples: in the batch's order; a sample's tokens are whole numbers, text and vision counted apart.
    cluster: ranks, ranks of a node (or the node of each rank), tokens that a rank holds of one pack, and the ranks' speeds (1.0: nominal; none: all nominal).
    cost: seconds and bytes of work and messages, of conf/cost/ or of your own measurements; every time of the plan is in seconds of it.
    planner: a name of PLANNERS. sync: `step`, ranks meet once a step, or `micro_batch`, all meet in every micro-batch.
    pool: the process groups that exist already, least recently used first; of plans that take hardly longer the one that makes fewest others is taken.

    Raises:
        SequenceTooLongError: a sequence is beyond the whole cluster.
        PlanError: no sequences, one without tokens, an unknown planner or mode.
    """
    begin = time.perf_counter()
    if planner not in PLANNERS:
        raise PlanError(f"planner: got {planner!r}; allowed: {', '.join(PLANNERS)}")
    if sync not in SYNCS:
        raise PlanError(f"sync: got {sync!r}; allowed: {', '.join(SYNCS)}")
    problem = problem_of(samples, cluster, cost, sync, pool)
    problem = replace(problem, lower_bound_s=lower_bound_s(problem))
    order = neighbours(cluster.nodes)
    schedule = PLANNERS[planner](problem) if order is None else renamed(PLANNERS[planner](reordered(problem, order)), order)
    times = times_of(problem, schedule)
    groups, makespan = groups_of(problem, schedule, times), makespan_of(problem, schedule, times)
    inputs: dict[str, Any] = {"speeds": list(cluster.speeds), "nodes": list(cluster.nodes), "cost": cost.to_json(), "pool": [list(ranks) for ranks in pool]}
    plan = Plan(planner, sync, cluster, problem.samples, groups, makespan, problem.lower_bound_s, 0.0, inputs)
    plan.validate()
    object.__setattr__(plan, "planning_time_s", time.perf_counter() - begin)
    return plan


def warm_up() -> float:
    """Compile the loops (in a thread, while workers start); returns the seconds that it took. Planning before that compiles what it needs by itself."""
    begin = time.perf_counter()
    cost = CostModel(1e-9, 1e-4, 1e5, 0.1, {2: 1e10}, vision_linear_s=1e-4)
    samples = [Sample(str(length), length, 0, ((1, 2, 2),)) for length in (30, 7, 5)]
    for sync in SYNCS:
        for speeds in ((), (1.0, 1.0, 1.0, 0.5)):
            plan_batch(samples, ClusterSpec(4, 4, 10, speeds), cost, sync=sync)
    return time.perf_counter() - begin


def replay(tree: dict[str, Any]) -> Plan:
    """Plan again from the inputs of a plan file (`Plan.to_json`)."""
    try:
        inputs, cluster = tree["inputs"], ClusterSpec.from_json(tree)
        samples, cost = samples_from_json(inputs["samples"]), CostModel.from_json(inputs["cost"])
        return plan_batch(samples, cluster, cost, planner=tree["planner"], sync=tree["sync"], pool=[tuple(ranks) for ranks in inputs["pool"]])
    except (KeyError, TypeError) as error:
        raise PlanError(f"plan file: no usable inputs ({error.__class__.__name__}: {error}); it does not replay") from None
