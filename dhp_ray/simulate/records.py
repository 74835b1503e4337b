"""What a simulated run records: its steps, the events between them, and a summary of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dhp_ray.simulate.step import SimulatedStep


class StepRecord(NamedTuple):
    """A step that ran: when its ranks were free for it, when it began and when it ended, in seconds since the run
    began. `shares`: see `SimulatedStep.shares`. `memory_bytes`: of the rank that held most.
    """

    step: int
    free_s: float
    begin_s: float
    end_s: float
    makespan_s: float
    predicted_s: float
    lower_bound_s: float
    num_tokens: int
    num_samples: int
    num_ranks: int
    generation: int
    late: bool
    data_wait_s: float
    plan_wait_s: float
    memory_bytes: float
    shares: dict[str, float]
    degrees: dict[int, int]


class RunEvent(NamedTuple):
    """An event between steps: a fault, a new generation or a checkpoint. It cost the run `seconds`."""

    time_s: float
    kind: str
    text: str
    seconds: float = 0.0


@dataclass
class RunRecord:
    """A run by one planner. `lost`: steps that a fault undid after they had run; they ran again. `kept`: a few steps in
    full, for pictures. `planning_s`: seconds that planning took on this machine, for each step that was run.
    """

    planner: str
    steps: list[StepRecord] = field(default_factory=list)
    lost: list[StepRecord] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)
    kept: dict[int, tuple[float, SimulatedStep]] = field(default_factory=dict)
    planning_s: list[float] = field(default_factory=list)
    time_s: float = 0.0
    error: str = ""

    def undo(self, step: int) -> int:
        """Remove all steps after `step`; returns their number."""
        gone = [record for record in self.steps if record.step > step]
        self.lost += gone
        del self.steps[len(self.steps) - len(gone) :]
        return len(gone)

    def summary(self, memory_bytes: float, num_ranks: int) -> dict[str, Any]:
        """The figures of the run. `memory_bytes`: of a device; `num_ranks`: of the whole cluster."""
        steps, time_s = self.steps, self.time_s
        tokens, samples = (sum(getattr(record, name) for record in steps) for name in ("num_tokens", "num_samples"))
        durations = np.array([record.end_s - record.begin_s for record in steps])
        weights = durations * np.array([record.num_ranks for record in steps])
        shares = {name: float(np.average([record.shares[name] for record in steps], weights=weights))
                  for name in (steps[0].shares if steps else ())}
        degrees = sum((Counter(record.degrees) for record in steps), Counter[int]())
        return {
            "planner": self.planner, "steps": len(steps), "time_s": time_s,
            "tokens_per_s": tokens / time_s if time_s else 0.0,
            "tokens_per_s_per_rank": tokens / time_s / num_ranks if time_s else 0.0,
            "samples_per_s": samples / time_s if time_s else 0.0,
            "step_s": _mean(durations), "makespan_s": _mean([record.makespan_s for record in steps]),
            "predicted_s": _mean([record.predicted_s for record in steps]),
            "over_bound": _mean([record.predicted_s / record.lower_bound_s for record in steps]),
            "shares": shares,
            "data_wait_s": sum(record.data_wait_s for record in steps),
            "plan_wait_s": sum(record.plan_wait_s for record in steps),
            "late_plans": sum(record.late for record in steps),
            "memory_bytes": max((record.memory_bytes for record in steps), default=0.0),
            "memory_share": max((record.memory_bytes for record in steps), default=0.0) / memory_bytes,
            "degrees": {str(degree): degrees[degree] for degree in sorted(degrees)},
            "faults": sum(event.kind == "fault" for event in self.events),
            "steps_run_again": len(self.lost),
            "recovery_s": sum(event.seconds for event in self.events if event.kind == "generation"),
            "checkpoint_s": sum(event.seconds for event in self.events if event.kind == "checkpoint"),
            "error": self.error}


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0
