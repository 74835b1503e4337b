"""The gain of planning, modelled: a run's plans beside those of the baselines for the same batches, in the same mode,
with the same memory and under the same cost model, each baseline at its best pack cap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from dhp_ray.planner import ClusterSpec, CostModel, PlanError, checked_problem, idle_fraction, plan_batch, plan_data_set
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, NO_RECOMPUTATION
from dhp_ray.planner.plan.types import Plan
from dhp_ray.planner.problem import Problem

RUN = "this run"
"""The plans that ran, including late ones, by whichever planner made them."""

OTHERS = {"dhp": "no plan late", "static": "one degree and one pack cap for all of these batches",
          "static_best": "the best degree and pack cap of each batch",
          "pow2": "degrees of two, four, eight ...", "dhp_paper": "the published method"}
"""The planners that the run is compared with, every baseline at its best pack cap."""


@dataclass
class Compared:
    """One step: the plan that ran, and the modelled seconds and idle share of it (RUN) and of other planners; a planner
    that cannot plan the batch is missing.

    other_mode_s: seconds of `dhp` in the other mode on devices of the same memory, if the longest sequence fits there
    with all activations.
    """

    step: int
    plan: Plan
    times_s: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    other_mode_s: float | None = None

    def add(self, name: str, plan: Plan) -> None:
        self.times_s[name], self.idle[name] = plan.predicted_time_s, idle_fraction(plan)


@dataclass
class Gains:
    steps: list[Compared] = field(default_factory=list)

    def planners(self) -> list[str]:
        """The run first, then the planners that could plan every batch, from the fastest to the slowest."""
        rest = [name for name in OTHERS if self.steps and all(name in step.times_s for step in self.steps)]
        return [RUN, *sorted(rest, key=self.total_s)]

    def best_baseline(self) -> str | None:
        """The fastest of the baselines, if any could plan every batch."""
        return next((name for name in self.planners()[1:] if name != "dhp"), None)

    def ran(self) -> dict[str, int]:
        """The number of plans that ran, by the planner that made them."""
        names = [step.plan.planner for step in self.steps]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def total_s(self, planner: str) -> float:
        return sum(step.times_s[planner] for step in self.steps)

    def idle(self, planner: str) -> float:
        """Idle share of the ranks' time, over all compared steps."""
        time_s = self.total_s(planner)
        return 1.0 - sum((1.0 - step.idle[planner]) * step.times_s[planner]
                         for step in self.steps) / time_s if time_s else 0.0

    def lower_bound_s(self) -> float:
        return sum(step.plan.lower_bound_s for step in self.steps)

    def other_mode_s(self) -> float | None:
        """Seconds of `dhp` for all batches in the other mode, if all of them fit there."""
        times = [step.other_mode_s for step in self.steps if step.other_mode_s is not None]
        return sum(times) if len(times) == len(self.steps) else None


def compare(steps: Sequence[int], read_plan: Callable[[int], dict[str, Any]], budget_s: float = 60.0) -> Gains:
    """Plan the batches of `steps` again with every baseline, in order, until the budget is used up (at least one
    batch).
    """
    gains, problems, begin = Gains(), [], perf_counter()
    for step in steps:
        if gains.steps and perf_counter() - begin > budget_s:
            break
        plan = Plan.from_json(read_plan(step))
        gains.steps.append(compared(step, plan))
        problems.append(problem_of_plan(plan))
    for alike in _on_equal_clusters(problems):
        for index, plan in zip(alike, plan_data_set([problems[index] for index in alike])):
            gains.steps[index].add("static", plan)
    gains.steps.sort(key=lambda step: step.step)
    return gains


def compared(step: int, plan: Plan) -> Compared:
    """The plan of a step beside other plans of its batch, on the same ranks, at their speeds, in its mode and under its
    cost.
    """
    found, problem = Compared(step, plan), problem_of_plan(plan)
    found.add(RUN, plan)
    for name in OTHERS:
        if name != "static":  # chosen for all batches together
            try:
                found.add(name, _planned(problem, name))
            except PlanError:
                continue  # shown as missing: not every baseline can plan every batch
    other, tokens = other_mode(plan)
    try:
        there = replace(problem, sync=other, cluster=replace(
            plan.cluster, tokens_per_rank=tokens, offload=NO_OFFLOAD, recomputation=NO_RECOMPUTATION))
        found.other_mode_s = _planned(there, "dhp").predicted_time_s
    except PlanError:
        found.other_mode_s = None  # the other mode's resident state leaves too little room
    return found


def problem_of_plan(plan: Plan) -> Problem:
    """The batch of a plan file, on the plan's cluster and under its cost."""
    return checked_problem(plan.samples, plan.cluster, CostModel.from_json(plan.inputs["cost"]), sync=plan.sync,
                           pool=[tuple(ranks) for ranks in plan.inputs["pool"]],
                           encoder=plan.inputs.get("encoder", "group"))


def other_mode(plan: Plan) -> tuple[str, int]:
    """The mode other than that of a plan, and the tokens that a rank of the same device holds in it."""
    other = "step" if plan.sync == "micro_batch" else "micro_batch"
    cost = CostModel.from_json(plan.inputs["cost"])
    return other, cost.tokens_at_equal_memory(plan.cluster.tokens_per_rank, plan.sync, other)


def _planned(problem: Problem, name: str) -> Plan:
    return plan_batch(problem.samples, problem.cluster, problem.cost, planner=name, sync=problem.sync,
                      pool=problem.pool, encoder=problem.encoder)


def _on_equal_clusters(problems: Sequence[Problem]) -> list[list[int]]:
    """Indices of the batches that ran in one mode on clusters that are equal except for speeds: they share a static
    layout.
    """
    places: dict[tuple[ClusterSpec, str], list[int]] = {}
    for place, problem in enumerate(problems):
        places.setdefault((replace(problem.cluster, speeds=(1.0,) * problem.cluster.num_ranks), problem.sync),
                          []).append(place)
    return list(places.values())


def spread(items: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the items, evenly spaced: the last one first, then from coarse to fine, so that every prefix
    of the result is spread too.
    """
    if not items or limit < 1:
        return []
    count = min(limit, len(items))
    even = sorted({round(place * (len(items) - 1) / max(count - 1, 1))
                   for place in range(count)}) if count > 1 else [len(items) - 1]
    order = sorted(range(len(even)),
                   key=lambda place: (0 if place == len(even) - 1 else 1, _reversed_bits(place, len(even))))
    return [items[even[place]] for place in order]


def _reversed_bits(number: int, size: int) -> int:
    width = max(1, (size - 1).bit_length())
    return int(f"{number:0{width}b}"[::-1], 2)
