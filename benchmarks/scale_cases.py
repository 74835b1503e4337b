"""The cases of benchmarks/scale.py: a model on a cluster with batches of a workload, and what planners make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dhp_ray.config import CONF
from dhp_ray.planner import Plan, Sample, checked_problem, plan_batch, plan_data_set
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import VisionPlan
from dhp_ray.planner.problem import Problem
from dhp_ray.planner.schedule import Schedule
from dhp_ray.planner.timeline import groups_of, makespan_of, times_of
from dhp_ray.simulate.machine import Place, SimulatedCluster
from dhp_ray.simulate.settings import Simulation, load_simulation
from dhp_ray.simulate.workload import Workload

SAMPLES_PER_RANK, NODE_RANKS = 8, 8
CLUSTERS = {"910B": "ascend_910b", "H100": "h100"}
"""Files of conf/cluster/simulated."""


@dataclass(frozen=True)
class Case:
    """A model on so many devices, with one batch of a workload for each of `seeds`, each of `samples` (0: 8 a rank).

    `recomputes` as `train.activation_checkpointing`, `expert_parallel` as `train.expert_parallel`.
    """

    model: str
    device: str
    workload: str
    sync: str = "micro_batch"
    num_ranks: int = 64
    seeds: tuple[int, ...] = (0, 1, 2)
    recomputes: str = "auto"
    samples: int = 0
    expert_parallel: str = "auto"

    def __str__(self) -> str:
        return f"{self.model}, {self.num_ranks} {self.device}, {self.workload}, {self.sync}"

    @cached_property
    def settings(self) -> Simulation:
        return load_simulation([
            f"model={self.model}", f"cluster={CLUSTERS[self.device]}", f"workload={self.workload}",
            f"sync={self.sync}", f"cluster.num_ranks={self.num_ranks}", f"cluster.ranks_per_node={NODE_RANKS}",
            f"global_samples={self.samples or SAMPLES_PER_RANK * self.num_ranks}",
            f"train.activation_checkpointing={self.recomputes}", f"train.expert_parallel={self.expert_parallel}"])


class Planned(NamedTuple):
    """Of one planner, all batches together: modelled seconds of the steps, and the plans."""

    time_s: float
    plans: list[Plan]


class Opened:
    """A case with its batches and costs."""

    def __init__(self, case: Case, batches: Sequence[Sequence[Sample]] | None = None) -> None:
        """Raises:
            PlanError: the model's state does not fit in this mode, or the longest sequence on all ranks.
        """
        self.case, settings = case, case.settings
        self.batches = batches or batches_of(case)
        longest = max(sample.num_tokens for batch in self.batches for sample in batch)
        self.machine = SimulatedCluster(settings, longest, self.batches[0])
        self.place: Place = self.machine.place(tuple(rank // NODE_RANKS for rank in range(case.num_ranks)))
        self.cost: CostModel = self.place.cost

    @property
    def cluster(self) -> ClusterSpec:
        return self.place.cluster

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for batch in self.batches for sample in batch)

    def planned(self, planner: str, *, encoder: str = "group") -> Planned:
        """The plans of a planner. `static` has one degree and one pack cap for all batches, the best for their sum."""
        if planner == "static":
            plans = plan_data_set(self.problems())
        else:
            plans = [plan_batch(batch, self.cluster, self.cost, planner=planner, sync=self.case.sync, encoder=encoder)
                     for batch in self.batches]
        return Planned(sum(plan.predicted_time_s for plan in plans), plans)

    def problems(self) -> list[Problem]:
        """One for each batch."""
        return [checked_problem(batch, self.cluster, self.cost, sync=self.case.sync) for batch in self.batches]


def opened(case: Case, batches: Sequence[Sequence[Sample]] | None = None) -> Opened | None:
    """None where the case does not fit."""
    try:
        return Opened(case, batches)
    except PlanError:
        return None


def plan_of(problem: Problem, schedule: Schedule) -> Plan:
    """The plan of a schedule that no planner of PLANNERS makes."""
    times = times_of(problem, schedule)
    return Plan("as given", problem.sync, problem.cluster, problem.samples, groups_of(problem, schedule, times),
                makespan_of(problem, schedule, times), 0.0, 0.0, {"cost": problem.cost.to_json()}, VisionPlan())


def batches_of(case: Case) -> list[list[Sample]]:
    settings = case.settings
    family = ModelShape.load(CONF / "model_shape" / f"{settings.model}.yaml").family
    workload = Workload(settings.workload, family)
    return [workload.batch(1, settings.global_samples, seed) for seed in case.seeds]
