"""The stages of a step, one type each: dispatched to the workers, running on them, finished by all of them. Once
committed it is a StepCommitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dhp_ray.data.stream import Batch
from dhp_ray.planner.plan import Plan
from dhp_ray.runtime.driver.calls import Calls
from dhp_ray.runtime.messages import Ran
from dhp_ray.train.results import StepResult


@dataclass
class DispatchedStep:
    """A planned batch under way to the workers.

    `prefetches` return the samples that the workers' prefetch threads could not decode. A thread collects all of these
    answers from Ray into `answers` while the previous step runs. `late`: the plan is the last resort's, because the
    planner's own plan was not ready in time.
    """

    step: int
    batch: Batch
    plan: Plan
    plan_id: str
    late: bool
    prefetches: Calls
    answers: Future[list[dict[str, str]]]


@dataclass
class RunningStep:
    """A step that the workers run: their pending results, when it began, and whether they mirror the state after it."""

    dispatched: DispatchedStep
    placeholders: dict[str, str]
    results: Calls
    begun_s: float
    data_wait_s: float
    mirrors: bool

    def finished(self, results: list[StepResult], step_time_s: float,
                 evaluated: Mapping[str, float]) -> FinishedStep:
        dispatched, batch = self.dispatched, self.dispatched.batch
        return FinishedStep(dispatched.step, dispatched.plan, dispatched.plan_id, dispatched.late, batch.epoch,
                            [(skipped.id, skipped.reason) for skipped in batch.skipped], self.placeholders, results,
                            step_time_s, self.data_wait_s,
                            evaluated)


@dataclass(frozen=True)
class FinishedStep:
    """A step that every rank has applied. `late`: it ran the last resort's plan. `results` may lack those of ranks that
    have been lost since.
    """

    step: int
    plan: Plan
    plan_id: str
    late: bool
    epoch: int
    skipped: list[tuple[str, str]]
    placeholders: dict[str, str]
    results: list[StepResult]
    step_time_s: float
    data_wait_s: float = 0.0
    evaluated: Mapping[str, float] = field(default_factory=dict)
    """The results of the evaluation after the step, by their names in metrics.jsonl; empty if there was none."""

    @property
    def generation(self) -> int:
        """Whose ranks ran it."""
        return int(self.plan_id.split(".")[0])

    @classmethod
    def reported(cls, step: int, plan_file: dict[str, Any], ran: list[Ran]) -> FinishedStep:
        """Build it from the plan file and from what the survivors of a generation report (`ran`, at least one)."""
        batch, results = plan_file["batch"], [found.result for found in ran]
        skipped = [(sample_id, reason) for sample_id, reason in batch["skipped"]]
        return cls(step, Plan.from_json(plan_file), plan_file["id"], plan_file["late"], batch["epoch"], skipped,
                   ran[0].placeholders, results,
                   max(result.step_time_s for result in results))
