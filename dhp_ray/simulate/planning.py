"""The plans of a simulated run. The planners themselves make them; whether a plan is in time or late is decided as in
`runtime/driver/dispatch.py` and `runtime/driver/feedback.py`.

    step n        |------------------------------------| results |
    step n + 1    | read | plan | decode ... |                   launch         in time: nobody waits
                  | read ......... | plan .................. |                  late: wait, or use the last resort
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np

from dhp_ray.comm.group_cache import GroupCacheState
from dhp_ray.planner import LAST_RESORT, ClusterSpec, Plan, checked_problem, plan_batch, plan_uniform, static_layout
from dhp_ray.planner.baselines.static import Layout
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.plan.types import Sample, encoding_ranks
from dhp_ray.runtime.driver.feedback import Expectation, patience_s
from dhp_ray.simulate.settings import DataSettings, PlanningSettings

LAYOUT_BATCHES = 8
"""Number of the first batches for which `static` chooses its one layout; the batch with the longest sequence is added.
"""


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

    def plan(self, samples: Sequence[Sample], speeds: tuple[float, ...], pool: Sequence[tuple[int, ...]],
             name: str = "") -> Plan:
        """Plan a batch. `name`: use this planner instead.

        Raises:
            PlanError: the planner cannot plan the batch on these ranks.
        """
        cluster = replace(self.cluster, speeds=speeds)
        if (name or self.name) == "static":
            if self._layout is None:
                self._layout = static_layout([
                    checked_problem(batch, self.cluster, self.cost, sync=self.sync, encoder=self.encoder)
                    for batch in self.layout_batches()])
            problem = checked_problem(samples, cluster, self.cost, sync=self.sync, pool=pool, encoder=self.encoder)
            return plan_uniform(problem, self._layout)
        return plan_batch(samples, cluster, self.cost, planner=name or self.name, sync=self.sync, pool=pool,
                          encoder=self.encoder)


class Prepared(NamedTuple):
    """A batch and its plan in the making, with the planner's inputs: when the batch is read, and when the plan is begun
    and made.
    """

    step: int
    samples: Sequence[Sample]
    plan: Plan
    speeds: tuple[float, ...]
    pool: list[tuple[int, ...]]
    read_s: float
    begun_s: float
    planned_s: float


class Dispatched(NamedTuple):
    """A plan, and when all ranks have it and have decoded their images. Of the time that the ranks wait once they are
    free, `data_wait_s` is for the batch and the images, `plan_wait_s` for the plan. `late`: the plan is the last
    resort's.
    """

    plan: Plan
    ready_s: float
    late: bool
    data_wait_s: float
    plan_wait_s: float


@dataclass
class SimulatedDispatcher:
    """Plans batch after batch for one membership, a step ahead. Times are simulated seconds."""

    planner: SimulatedPlanner
    book: GroupCacheState
    planning: PlanningSettings
    data: DataSettings
    expectation: Expectation = field(default_factory=Expectation)
    _planner_free_s: float = 0.0  # one plan is made at a time, also one that nobody waits for any more

    def begin(self, step: int, samples: Sequence[Sample], speeds: tuple[float, ...], now_s: float, is_read: bool
              ) -> Prepared:
        """Read a batch (unless it has been read) and plan it, from `now_s` on."""
        rate = self.data.samples_per_s
        read_s = now_s + (len(samples) / rate if rate and not is_read else 0.0)
        pool = self.book.held()
        plan = self.planner.plan(samples, speeds, pool)
        begun_s = max(read_s, self._planner_free_s)
        self._planner_free_s = begun_s + self._planning_s(plan, self.planning.item_s)
        return Prepared(step, samples, plan, speeds, pool, read_s, begun_s, self._planner_free_s)

    def take(self, prepared: Prepared, free_s: float, scale: float | None) -> Dispatched:
        """The plan that is sent to the ranks, which are free from `free_s` on; `scale`: measured over predicted
        seconds, once known.
        """
        asked_s = max(free_s, prepared.read_s)
        sent_s, plan, late, begun = max(asked_s, prepared.planned_s), prepared.plan, False, True
        if prepared.planned_s > asked_s:
            resort = self.planner.plan(prepared.samples, prepared.speeds, prepared.pool, LAST_RESORT)
            resort_s = asked_s + self._planning_s(resort, self.planning.last_resort_item_s)
            expected_s = self.expectation.makespan_s(resort.lower_bound_s)
            given_up_s = max(resort_s, asked_s + patience_s(resort.predicted_time_s, expected_s, scale))
            late = prepared.planned_s > given_up_s
            sent_s, plan = (given_up_s, resort) if late else (max(resort_s, prepared.planned_s), plan)
            begun = prepared.begun_s < given_up_s
        if begun:
            self.expectation.observe(prepared.plan)
        else:
            self._planner_free_s = prepared.begun_s
        decoded_s = (sent_s if late else prepared.planned_s) + self._decoding_s(plan)
        ready_s = max(sent_s, decoded_s)
        return Dispatched(plan, ready_s, late, max(0.0, asked_s - free_s) + ready_s - sent_s, sent_s - asked_s)

    def _planning_s(self, plan: Plan, item_s: float) -> float:
        if self.planning.measured:
            return plan.planning_time_s
        return item_s * (len(plan.samples) + sum(len(sample.vision_grids) for sample in plan.samples))

    def _decoding_s(self, plan: Plan) -> float:
        """Seconds of the rank that decodes most; each rank that encodes a part of an image decodes all of it."""
        if not self.data.patches_per_s:
            return 0.0
        patches = np.zeros(plan.cluster.num_ranks)
        for group in plan.groups:
            grids = [grid for row in group.sequences for grid in plan.samples[row].vision_grids]
            for ranks, grid in zip(encoding_ranks(group.encoders, group.splits), grids, strict=True):
                patches[list(ranks)] += prod(grid)
        return float(patches.max()) / self.data.patches_per_s
