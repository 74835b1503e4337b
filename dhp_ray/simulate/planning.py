"""The plans of a simulated run. The planners themselves make them; whether a plan is in time or late is decided as in
`runtime/driver/dispatch.py` and `runtime/driver/feedback.py`.

    step n        |------------------------------------| results |
    step n + 1    | plan |                                       launch         in time: nobody waits
                  | plan ........................................... |          late: wait, or use the last resort
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dhp_ray.planner import LAST_RESORT, ClusterSpec, Plan, checked_problem, plan_batch, plan_uniform, static_layout
from dhp_ray.planner.baselines.static import Layout
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.plan.types import Sample
from dhp_ray.runtime.driver.feedback import Expectation, patience_s
from dhp_ray.simulate.settings import PlanningSettings

LAYOUT_BATCHES = 8  # the first batches for which `static` chooses its layout, beside that of the longest sequence
LAST_RESORT_ITEM_S = 5e-6  # as `planning.item_s`, of the planner that runs if a plan is late


@dataclass
class SimulatedPlanner:
    """A planner in one membership. `layout_batches`: the batches for which the layout of `static` is chosen."""

    name: str
    sync: str
    encoder: str
    cluster: ClusterSpec
    cost: CostModel
    layout_batches: Callable[[], Sequence[Sequence[Sample]]]
    _layout: Layout | None = None

    def plan(self, samples: Sequence[Sample], speeds: tuple[float, ...], name: str = "") -> Plan:
        """Plan a batch. `name`: use this planner instead. PlanError: it cannot."""
        cluster = replace(self.cluster, speeds=speeds)
        if (name or self.name) == "static":
            if self._layout is None:
                self._layout = static_layout([
                    checked_problem(batch, self.cluster, self.cost, sync=self.sync, encoder=self.encoder)
                    for batch in self.layout_batches()])
            problem = checked_problem(samples, cluster, self.cost, sync=self.sync, encoder=self.encoder)
            return plan_uniform(problem, self._layout)
        return plan_batch(samples, cluster, self.cost, planner=name or self.name, sync=self.sync, encoder=self.encoder)


class Prepared(NamedTuple):
    """A batch and its plan in the making, with the planner's inputs: when the plan is begun and made."""

    step: int
    samples: Sequence[Sample]
    plan: Plan
    speeds: tuple[float, ...]
    begun_s: float
    planned_s: float


class Dispatched(NamedTuple):
    """A plan, and when all have it. `plan_wait_s`: how long ranks wait. `late`: it is the last resort's."""

    plan: Plan
    ready_s: float
    late: bool
    plan_wait_s: float


@dataclass
class SimulatedDispatcher:
    """Plans batch after batch for one membership, a step ahead. Times are simulated seconds."""

    planner: SimulatedPlanner
    planning: PlanningSettings
    expectation: Expectation = field(default_factory=Expectation)
    _planner_free_s: float = 0.0  # one plan is made at a time, also one that nobody waits for any more

    def begin(self, step: int, samples: Sequence[Sample], speeds: tuple[float, ...], now_s: float) -> Prepared:
        plan = self.planner.plan(samples, speeds)
        begun_s = max(now_s, self._planner_free_s)
        self._planner_free_s = begun_s + _planning_s(plan, self.planning.item_s)
        return Prepared(step, samples, plan, speeds, begun_s, self._planner_free_s)

    def take(self, prepared: Prepared, free_s: float, scale: float | None) -> Dispatched:
        """The plan that ranks get, which are free at `free_s`; `scale`: measured over predicted seconds."""
        sent_s, plan, late, begun = max(free_s, prepared.planned_s), prepared.plan, False, True
        if prepared.planned_s > free_s:
            resort = self.planner.plan(prepared.samples, prepared.speeds, LAST_RESORT)
            resort_s = free_s + _planning_s(resort, LAST_RESORT_ITEM_S)
            expected_s = self.expectation.makespan_s(resort.lower_bound_s)
            given_up_s = max(resort_s, free_s + patience_s(resort.predicted_time_s, expected_s, scale))
            late = prepared.planned_s > given_up_s
            sent_s, plan = (given_up_s, resort) if late else (max(resort_s, prepared.planned_s), plan)
            begun = prepared.begun_s < given_up_s
        if begun:
            self.expectation.observe(prepared.plan)
        else:
            self._planner_free_s = prepared.begun_s
        return Dispatched(plan, sent_s, late, sent_s - free_s)


def _planning_s(plan: Plan, item_s: float) -> float:
    return item_s * (len(plan.samples) + sum(len(sample.vision_grids) for sample in plan.samples))
