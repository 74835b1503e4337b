"""A whole simulation: all of its planners, one after the other, on the same batches, speeds and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from dhp_ray.config import CONF
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.simulate.batches import Batches
from dhp_ray.simulate.machine import Machine
from dhp_ray.simulate.records import RunRecord
from dhp_ray.simulate.run import SimulatedRun
from dhp_ray.simulate.settings import Simulation
from dhp_ray.simulate.workload import Workload

Progress = Callable[[str, int, float], None]
"""Called with a planner, its step that has ended, and the simulated second."""


@dataclass
class Simulated:
    """A simulation: its settings, its machine and batches, and the records of the runs so far."""

    settings: Simulation
    machine: Machine
    batches: Batches
    records: list[RunRecord] = field(default_factory=list)

    def summaries(self) -> list[dict[str, Any]]:
        return [record.summary(self.machine.memory_bytes, self.settings.cluster.num_ranks) for record in self.records]

    def to_json(self) -> dict[str, Any]:
        """The whole result. Only `planning_s_here`, the seconds that planning took on this machine, differs from one
        simulation to the next with the same settings (unless they have `planning.measured`).
        """
        training = self.machine.first
        return {
            "modelled": "all times are modelled, none is measured",
            "settings": asdict(self.settings),
            "mode": str(training.mode), "tokens_per_rank": training.tokens_per_rank,
            "cost": training.cost.to_json(), "longest_tokens": self.batches.longest_tokens,
            "left_out": sorted(self.batches.left_out), "planners": self.summaries(),
            "steps": {record.planner: [step._asdict() for step in record.steps] for record in self.records},
            "events": {record.planner: [event._asdict() for event in record.events] for record in self.records},
            "planning_s_here": {record.planner: record.planning_s for record in self.records}}


def prepared(settings: Simulation) -> Simulated:
    """Make the machine and the batches; nothing runs yet.

    Raises:
        ConfigError, PlanError: one line: what is wrong with the settings or a file, or what does not fit.
    """
    shape = ModelShape.load(CONF / "model_shape" / f"{settings.model}.yaml")
    batches = Batches(Workload(settings.workload, shape.family), settings.global_samples,
                      0 if settings.duration_s else settings.num_batches, settings.seed)
    return Simulated(settings, Machine(settings, batches.longest_tokens, batches(1)), batches)


def simulated(simulation: Simulated, progress: Progress = lambda planner, step, now_s: None) -> Iterator[RunRecord]:
    """Run the planners one after the other, and yield the record of each when it ends."""
    for planner in simulation.settings.planners:
        run = SimulatedRun(planner, simulation.machine, simulation.batches,
                           lambda step, now_s, planner=planner: progress(planner, step, now_s))  # type: ignore[misc]
        simulation.records.append(run.simulate())
        yield simulation.records[-1]
