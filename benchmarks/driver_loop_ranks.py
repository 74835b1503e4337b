"""The ranks of benchmarks/driver_loop.py: handles that answer at once, and real actors."""

from __future__ import annotations

import functools
import pickle
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from dhp_ray.planner import CostModel
from dhp_ray.planner.cost.work import work_of
from dhp_ray.planner.plan.types import Plan
from dhp_ray.runtime.messages import Status
from dhp_ray.train.results import PackTime, StepResult


class Handle:
    """The handle of a rank whose answers are there before it is asked."""

    def __init__(self, results: list[ray.ObjectRef], no_copies: ray.ObjectRef, no_failures: ray.ObjectRef) -> None:
        self._results, self._others = results, {"prefetch": no_failures, "mirrored": no_copies}
        self.calls: Counter[str] = Counter()

        self.run, self.prefetch, self.mirrored = (SimpleNamespace(remote=functools.partial(self._answer, name))
                                                  for name in ("run", "prefetch", "mirrored"))

    def _answer(self, method: str, *arguments: Any) -> ray.ObjectRef:
        self.calls[method] += 1
        return self._results[pickle.loads(arguments[0]).step - 1] if method == "run" else self._others[method]


class Ranks:
    """An actor that answers for many ranks."""

    def answer_as(self, result: StepResult) -> None:
        self.result = result

    @ray.method(concurrency_group="prefetch")
    def prefetch(self, packed: bytes, references: list[ray.ObjectRef]) -> dict[str, str]:
        return {}

    def run(self, packed: bytes) -> StepResult:
        order = pickle.loads(packed)
        return self.result._replace(step=order.step, plan_id=order.plan_id)

    @ray.method(concurrency_group="control")
    def mirrored(self) -> list[float]:
        return []

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        """The driver asks this of ranks that are slow to answer, as few actors that stand for many are."""
        return Status(1, "run")


def prepared_handles(plan: Plan, num_steps: int) -> list[Any]:
    num_ranks = plan.cluster.num_ranks

    @ray.remote(num_cpus=1, num_returns=num_ranks)
    def answers(each: list[Any]) -> list[Any]:
        return each

    results = results_of(plan)
    by_step = [answers.remote([result._replace(step=step, plan_id=f"1.{step}.{step}") for result in results])
               for step in range(1, num_steps + 1)]
    no_copies, no_failures = answers.remote([[]] * num_ranks), answers.remote([{}] * num_ranks)
    ray.get([references[0] for references in (*by_step, no_copies, no_failures)])
    return [Handle([references[rank] for references in by_step], no_copies[rank], no_failures[rank])
            for rank in range(num_ranks)]


def real_handles(num_actors: int, plan: Plan, num_steps: int) -> list[Any]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": {"prefetch": 1, "control": 1}}
    actor = ray.remote(**options)(Ranks)
    actors = [actor.remote() for _ in range(num_actors)]
    ray.get([each.answer_as.remote(results_of(plan)[0]) for each in actors])
    return [actors[rank % num_actors] for rank in range(plan.cluster.num_ranks)]


def results_of(plan: Plan) -> list[StepResult]:
    """What ranks of equal speed report, when a step takes as long as predicted."""
    free_s = [0.0] * plan.cluster.num_ranks
    times: list[list[PackTime]] = [[] for _ in free_s]
    cost = CostModel.from_json(plan.inputs["cost"])
    work, computing_s = work_of(plan), np.zeros(len(plan.groups))
    in_packs = work.group >= 0  # not in the encoder's phases
    np.maximum.at(computing_s, work.group[in_packs], work.seconds(cost)[in_packs])
    for index, group in enumerate(plan.groups):
        begin_s = max(free_s[rank] for rank in group.ranks)
        for rank in group.ranks:
            blocked_s = group.predicted_time_s - computing_s[index]
            times[rank].append(PackTime(index, begin_s, begin_s + group.predicted_time_s, blocked_s))
            free_s[rank] = begin_s + group.predicted_time_s
    pool = {"hits": 9, "creates": 3, "evictions": 1, "overflows": 0}
    return [StepResult(1, rank, 2.0, 100, 1.0, 1e-4, True, 1, max(free_s), 0.01, tuple(times[rank]), pool)
            for rank in range(len(free_s))]
