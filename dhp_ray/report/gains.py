"""The gain of planning, modelled: a run's plans beside those of the baselines for the same batches, in the same mode,
with the same memory and under the same cost model, each baseline at its best pack cap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from dhp_ray.planner import (
    ClusterSpec,
    PlanError,
    checked_problem,
    idle_fraction,
    plan_batch,
    plan_data_set,
    recorded_inputs,
)
from dhp_ray.planner.plan.types import Plan
from dhp_ray.planner.problem import Problem

RUN = "this run"  # the plans that ran, including late ones, by whichever planner made them
OTHERS = {"dhp": "no plan late", "static": "one degree and one pack cap for all of these batches",
          "static_best": "the best degree and pack cap of each batch",
          "pow2": "degrees of two, four, eight ...", "dhp_paper": "the published method"}
"""The planners that the run is compared with, every baseline at its best pack cap."""

GOLDEN = 0.618034  # the golden ratio, by which `spread` orders


@dataclass
class Gains:
    """The plans of some batches: those that ran (RUN) and those of other planners (None: it cannot plan the batch)."""

    plans: dict[str, list[Plan | None]]

    @property
    def ran(self) -> list[Plan]:
        return self._of(RUN)

    def planners(self) -> list[str]:
        """The run first, then the planners that could plan every batch, from the fastest to the slowest."""
        rest = [name for name in OTHERS if self.ran and None not in self.plans[name]]
        return [RUN, *sorted(rest, key=self.total_s)]

    def best_baseline(self) -> str | None:
        """The fastest of the baselines, if any could plan every batch."""
        return next((name for name in self.planners()[1:] if name != "dhp"), None)

    def total_s(self, planner: str) -> float:
        return sum(plan.predicted_time_s for plan in self._of(planner))

    def idle(self, planner: str) -> float:
        """Idle share of the ranks' time, over all compared steps."""
        time_s = self.total_s(planner)
        idle_s = sum(idle_fraction(plan) * plan.predicted_time_s for plan in self._of(planner))
        return idle_s / time_s if time_s else 0.0

    def lower_bound_s(self) -> float:
        return sum(plan.lower_bound_s for plan in self.ran)

    def _of(self, planner: str) -> list[Plan]:
        return [plan for plan in self.plans[planner] if plan]


def compare(steps: Sequence[int], read_plan: Callable[[int], dict[str, Any]], budget_s: float = 60.0) -> Gains:
    """Plan the batches of `steps` again with every baseline, in order, until the budget is used up (at least one)."""
    problems: list[Problem] = []
    plans: dict[str, list[Plan | None]] = {name: [] for name in (RUN, *OTHERS)}
    begin = perf_counter()
    for step in steps:
        if problems and perf_counter() - begin > budget_s:
            break
        tree = read_plan(step)
        inputs = recorded_inputs(tree)
        problems.append(checked_problem(**inputs))
        for name, found in plans.items():
            found.append(Plan.from_json(tree) if name == RUN else _planned(inputs, name))
    for alike in _on_equal_clusters(problems):
        for index, plan in zip(alike, plan_data_set([problems[index] for index in alike])):
            plans["static"][index] = plan
    return Gains(plans)


def _planned(inputs: dict[str, Any], name: str) -> Plan | None:
    """A batch by a planner; None if it cannot plan the batch, and for `static`, which plans all batches together."""
    try:
        return plan_batch(**inputs | {"planner": name}) if name != "static" else None
    except PlanError:
        return None


def _on_equal_clusters(problems: Sequence[Problem]) -> list[list[int]]:
    """Indices of batches with one mode and one cluster, but for speeds: they share a static layout."""
    places: dict[tuple[ClusterSpec, str], list[int]] = {}
    for place, problem in enumerate(problems):
        places.setdefault((replace(problem.cluster, speeds=(1.0,) * problem.cluster.num_ranks), problem.sync),
                          []).append(place)
    return list(places.values())


def spread(items: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the items, the last one first, so that each prefix is evenly spread."""
    count = min(limit, len(items))
    places = np.linspace(len(items) - 1, 0, count).round().astype(int).tolist()
    order = sorted(range(count), key=lambda number: number * GOLDEN % 1)  # neighbours are far apart in this order
    return [items[places[number]] for number in order]
