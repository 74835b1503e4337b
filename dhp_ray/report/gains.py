"""What planning gained: a run's plans beside those that the baselines make of the same batches, under the same cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from dhp_ray.planner import ClusterSpec, CostModel, PlanError, idle_fraction, plan_batch
from dhp_ray.planner.plan import GroupPlan, Pack, Plan, samples_from_json

BASELINES = ("static", "static_best", "pow2", "dhp_paper")


@dataclass(frozen=True)
class Compared:
    """One step: modelled seconds and idle share of its plan and of each baseline's; a baseline that cannot plan the batch is missing."""

    step: int
    planner: str
    lower_bound_s: float
    times_s: dict[str, float]
    idle: dict[str, float]


@dataclass
class Gains:
    steps: list[Compared] = field(default_factory=list)

    def planners(self) -> list[str]:
        """The run's own planners first, then the baselines that could plan every batch, slowest last."""
        own = list(dict.fromkeys(step.planner for step in self.steps))
        rest = [name for name in BASELINES if name not in own and self.steps and all(name in step.times_s for step in self.steps)]
        return own[:1] + sorted(rest, key=self.total_s)

    def total_s(self, planner: str) -> float:
        return sum(step.times_s[planner if planner in step.times_s else step.planner] for step in self.steps)

    def idle(self, planner: str) -> float:
        """Idle share of rank time, over all steps compared."""
        busy = sum((1.0 - step.idle[planner]) * step.times_s[planner] for step in self.steps if planner in step.times_s)
        time_s = sum(step.times_s[planner] for step in self.steps if planner in step.times_s)
        return 1.0 - busy / time_s if time_s else 0.0

    def lower_bound_s(self) -> float:
        return sum(step.lower_bound_s for step in self.steps)


def compare(steps: Sequence[int], read_plan: Callable[[int], dict[str, Any]], budget_s: float = 60.0) -> Gains:
    """Plan the batches of `steps` again with every baseline, as many as the budget allows (at least one), in the order given."""
    gains, begin = Gains(), perf_counter()
    for step in steps:
        if gains.steps and perf_counter() - begin > budget_s:
            break
        gains.steps.append(compared(step, plan_from_json(read_plan(step))))
    gains.steps.sort(key=lambda step: step.step)
    return gains


def compared(step: int, plan: Plan) -> Compared:
    """The plan of a step beside the baselines' plans of its batch, on its ranks, with their speeds, under its cost."""
    times_s, idle = {plan.planner: plan.predicted_time_s}, {plan.planner: idle_fraction(plan)}
    cost = CostModel.from_json(plan.inputs["cost"])
    pool = [tuple(ranks) for ranks in plan.inputs["pool"]]
    for name in BASELINES:
        if name == plan.planner:
            continue
        try:
            other = plan_batch(plan.samples, plan.cluster, cost, planner=name, sync=plan.sync, pool=pool)
        except PlanError:
            continue  # shown as missing: not every baseline can plan every batch
        times_s[name], idle[name] = other.predicted_time_s, idle_fraction(other)
    return Compared(step, plan.planner, plan.lower_bound_s, times_s, idle)


def plan_from_json(tree: dict[str, Any]) -> Plan:
    """A plan file as it was made, not planned again.

    Raises:
        PlanError: it has no inputs, or they are damaged.
    """
    try:
        inputs, cluster = tree["inputs"], ClusterSpec.from_json(tree)
        groups = tuple(GroupPlan(tuple(group["ranks"]), Pack(tuple(group["sequences"])), group["predicted_time_s"], 0.0, group["micro_batch"],
                                 tuple(group.get("encoders", ()))) for group in tree["groups"])
        plan = Plan(tree["planner"], tree["sync"], cluster, samples_from_json(inputs["samples"]), groups, tree["predicted_time_s"], tree["lower_bound_s"],
                    tree["planning_time_s"], {"speeds": inputs["speeds"], "cost": inputs["cost"], "pool": inputs["pool"]})
    except (KeyError, TypeError) as error:
        raise PlanError(f"plan file: damaged ({error.__class__.__name__}: {error})") from None
    plan.validate()
    return plan


def spread(items: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the items, evenly spaced, the last one first and then from coarse to fine: cut short anywhere, what is left is spread too."""
    if not items or limit < 1:
        return []
    count = min(limit, len(items))
    even = sorted({round(place * (len(items) - 1) / max(count - 1, 1)) for place in range(count)}) if count > 1 else [len(items) - 1]
    order = sorted(range(len(even)), key=lambda place: (0 if place == len(even) - 1 else 1, _reversed_bits(place, len(even))))
    return [items[even[place]] for place in order]


def _reversed_bits(number: int, size: int) -> int:
    width = max(1, (size - 1).bit_length())
    return int(f"{number:0{width}b}"[::-1], 2)
