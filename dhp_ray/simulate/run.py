"""A simulation: its planners one after the other on the same batches, speeds and faults; each run goes batch after
batch, through faults, as in `runtime/driver`. The pure functions that decide there also decide here.

    generation 1   | step 1 | step 2 | step 3 ..x fault          lost: the begun step 3, and the steps since the last
                                                | seen | form |  copy of the state
    generation 2                                              | step 2 | step 3 | join |     lost ranks return
    generation 3                                                                       | step 4 | ...
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dhp_ray.config import CONF
from dhp_ray.errors import counted
from dhp_ray.planner.cost.work import PAID_ONCE, work_of
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.plan.types import Plan, Sample
from dhp_ray.planner.problem import problem_of
from dhp_ray.report.step_picture import draw_plan
from dhp_ray.report.trace import trace_of
from dhp_ray.runtime.driver.feedback import Mirroring, SpeedMeter, TimeScale
from dhp_ray.schema import ConfigError, Elastic
from dhp_ray.simulate.faults import Fault, Recovery, SimulatedGeneration, faults_of, speeds_of
from dhp_ray.simulate.machine import SimulatedCluster
from dhp_ray.simulate.planning import LAYOUT_BATCHES, Dispatched, Prepared, SimulatedDispatcher, SimulatedPlanner
from dhp_ray.simulate.settings import Simulation
from dhp_ray.simulate.step import SimulatedStep, simulate_step
from dhp_ray.simulate.workload import Batches, Workload

RECENT = 8  # number of recent steps whose median time is the time of a step (`History.step_times_s`)


class StepRecord(NamedTuple):
    """A step that ran. `shares`: see `SimulatedStep.shares`. `memory_bytes`: of the rank that held most."""

    step: int
    begin_s: float
    end_s: float
    predicted_s: float
    num_tokens: int
    num_samples: int
    num_ranks: int
    generation: int
    late: bool
    plan_wait_s: float
    memory_bytes: float
    shares: dict[str, float]


class RunEvent(NamedTuple):
    """An event between steps: a fault, a new generation or a checkpoint. It cost the run `seconds`."""

    time_s: float
    kind: str
    text: str
    seconds: float = 0.0


@dataclass
class RunRecord:
    """A run by one planner. `lost`: steps that a fault undid. `first`: the first step in full, for a picture."""

    planner: str
    steps: list[StepRecord] = field(default_factory=list)
    lost: list[StepRecord] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)
    first: SimulatedStep | None = None
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
        return {
            "planner": self.planner, "steps": len(steps), "time_s": time_s,
            "tokens_per_s": tokens / time_s if time_s else 0.0,
            "tokens_per_s_per_rank": tokens / time_s / num_ranks if time_s else 0.0,
            "samples_per_s": samples / time_s if time_s else 0.0,
            "step_s": float(durations.mean()) if steps else 0.0, "shares": shares,
            "plan_wait_s": sum(record.plan_wait_s for record in steps),
            "late_plans": sum(record.late for record in steps),
            "memory_bytes": max((record.memory_bytes for record in steps), default=0.0),
            "memory_share": max((record.memory_bytes for record in steps), default=0.0) / memory_bytes,
            "faults": sum(event.kind == "fault" for event in self.events),
            "steps_run_again": len(self.lost),
            "checkpoint_s": sum(event.seconds for event in self.events if event.kind == "checkpoint"),
            "error": self.error}


class SimulatedRun:
    """One planner on a machine, with the batches, speeds and faults of a simulation's settings."""

    def __init__(
        self, planner: str, machine: SimulatedCluster, batches: Batches,
        progress: Callable[[int, float], None] = lambda step, now_s: None,
    ) -> None:
        """`progress` is called with each step that has ended, and when it ended."""
        self.settings, self.machine, self.batches, self.progress = machine.settings, machine, batches, progress
        self.record, self.scale, faults = RunRecord(planner), TimeScale(), self.settings.faults
        num_ranks, seed = self.settings.cluster.num_ranks, self.settings.seed
        self.speeds, self.faults = speeds_of(faults, num_ranks, seed), faults_of(faults, seed)
        self.even = bool((self.speeds == 1.0).all())
        self.next_fault = next(self.faults, None)
        self.mirroring = Mirroring("0" if faults.policy == "restart" else faults.mirror_every_steps)
        self.step_times_s: deque[float] = deque(maxlen=RECENT)
        self.now_s, self.saved_s = 0.0, 0.0
        self.ended_s = 0.0  # the last step ended then, or the group was formed
        self._mirrors = self.mirroring.auto or self.mirroring.every > 0
        self.recovery = Recovery(faults, num_ranks, self._mirrors, self._holds, self._another)
        self.generation = self._entered(
            SimulatedGeneration(1, range(num_ranks), self.settings.cluster.ranks_per_node, 0, self._mirrors))

    def simulate(self) -> RunRecord:
        """Run to the end. A run that cannot go on ends early, with `error` in its record."""
        try:
            while not self._done():
                self._steps()
        except PlanError as error:
            self.record.error = str(error)
        self.record.time_s = self.now_s
        return self.record

    def _done(self) -> bool:
        if self.settings.duration_s:
            return self.now_s >= self.settings.duration_s
        return self.generation.newest >= self.settings.num_batches

    def _entered(self, generation: SimulatedGeneration) -> SimulatedGeneration:
        """Enter a membership: make its planner and its meter, and begin to copy its state."""
        self.place = self.machine.place(generation.nodes)
        planning, place = self.settings.planning, self.place
        planner = SimulatedPlanner(self.record.planner, place.mode.sync, planning.encoder, place.cluster, place.cost,
                                   self._layout_batches)
        self.dispatcher = SimulatedDispatcher(planner, planning)
        self.meter = SpeedMeter(generation.size, Elastic().evict_below)
        self.mirroring.enter()
        if self._mirrors and generation.size > 1:
            generation.mirrored.append((generation.first, self.now_s + self.place.copy_s))
        return generation

    def _layout_batches(self) -> list[list[Sample]]:
        total = self.settings.num_batches if not self.settings.duration_s else LAYOUT_BATCHES
        steps = {*range(1, min(total, LAYOUT_BATCHES) + 1), self.batches.longest_step}
        return [self.batches(step) for step in sorted(steps)]

    def _steps(self) -> None:
        """Run steps until the membership changes or the run is done."""
        if self._changed():  # the steps that are run again may need more ranks
            return None
        prepared = self._begin(self.generation.newest + 1, self.now_s)
        taken = self.dispatcher.take(prepared, self.now_s, self.scale.known())
        while True:
            sent = taken._replace(ready_s=max(taken.ready_s, self.now_s))
            fault = self._fault_before(sent.ready_s)
            if fault:
                return self._broken(fault)
            step = self._run(sent.plan)
            end_s = self._end_s(prepared.step, sent.ready_s + step.time_s)
            is_last = not self.settings.duration_s and prepared.step == self.settings.num_batches
            following = prepared if is_last else self._begin(prepared.step + 1, sent.ready_s)
            fault = self._fault_before(end_s)
            if fault and fault.kind != "driver":  # without the driver workers end the step
                return self._broken(fault)
            if self.settings.duration_s and end_s > self.settings.duration_s:
                self.now_s = self.settings.duration_s
                return self._note(fault)
            if not is_last:  # before the checkpoint, as the driver does
                taken = self.dispatcher.take(following, end_s, self.scale.known())
            self._commit(prepared.step, sent, step, end_s)
            if fault:
                return self._broken(fault)
            if self._done() or self._changed():
                return None
            prepared = following

    def _begin(self, step: int, now_s: float) -> Prepared:
        speeds = (1.0,) * self.generation.size if self.even else self.meter.planned()
        return self.dispatcher.begin(step, self.batches(step), speeds, now_s)

    def _fault_before(self, time_s: float) -> Fault | None:
        """Take the next fault that strikes somebody, if it does before `time_s` and the run's end."""
        time_s = min(time_s, self.settings.duration_s or time_s)
        while (fault := self.next_fault) and fault.time_s < time_s:
            self.next_fault = next(self.faults, None)
            if fault.kind == "driver" or self.recovery.lost_by(self.generation, fault):
                return fault
        return None

    def _run(self, plan: Plan) -> SimulatedStep:
        """Simulate a step at the true speeds of the ranks."""
        cluster = plan.cluster
        if not self.even:
            cluster = replace(cluster, speeds=tuple(self.speeds[self.generation.slots].tolist()))
        problem = problem_of(plan.samples, cluster, self.place.cost, plan.sync, deals_images=False)
        return simulate_step(plan, problem)

    def _end_s(self, step: int, end_s: float) -> float:
        """When a step ends: with its work, or with the last copies if it is mirrored or its generation's first."""
        waits = step == self.generation.first + 1 or self.mirroring.due(step)
        if waits and self.generation.mirrored:
            return max(end_s, self.generation.mirrored[-1][1])
        return end_s

    def _commit(self, number: int, sent: Dispatched, step: SimulatedStep, end_s: float) -> None:
        """Record a step, and decide what follows from it: speeds, copies of the state, a checkpoint."""
        plan, faults = sent.plan, self.settings.faults
        record = StepRecord(
            number, sent.ready_s, end_s, plan.predicted_time_s, sum(sample.num_tokens for sample in plan.samples),
            len(plan.samples), self.generation.size, self.generation.number, sent.late, sent.plan_wait_s,
            float(step.memory_bytes().max()), step.shares())
        self.record.steps.append(record)
        self.record.first = self.record.first or step
        self._observe(plan, step)
        self.generation.newest, self.ended_s = number, end_s
        self.now_s = end_s + self.settings.planning.between_s
        self.step_times_s.append(end_s - sent.ready_s)
        if self._mirrors and self.mirroring.due(number) and self.generation.size > 1:
            self.mirroring.last = number
            self.generation.mirrored.append((number, end_s + self.place.copy_s))
            self.mirroring.observe([[self.place.copy_s]] * self.generation.size, statistics.median(self.step_times_s))
        if faults.checkpoint_every_s and end_s - self.saved_s >= faults.checkpoint_every_s:
            self.saved_s, begun_s = end_s, self.now_s
            whole_s = max((whole_s for _, whole_s in self.recovery.saves), default=0.0)
            self.now_s = max(self.now_s, whole_s) + faults.stage_s  # one checkpoint is written at a time
            self.recovery.saves.append((number, self.now_s + faults.write_s))
            self.now_s = min(self.now_s, self.settings.duration_s or self.now_s)
            self.record.events.append(RunEvent(end_s, "checkpoint", f"after step {number}", self.now_s - begun_s))
        self.progress(number, self.now_s)

    def _observe(self, plan: Plan, step: SimulatedStep) -> None:
        self.scale.observe(step.makespan_s, plan.makespan_s)
        if not self.even:
            cost = self.place.cost
            work, num_ranks = work_of(plan), self.generation.size
            self.meter.observe(work.seconds_of_ranks(cost, num_ranks), step.busy_s().tolist(),
                               work.seconds_of_ranks(cost, num_ranks, PAID_ONCE))

    def _changed(self) -> bool:
        """Whether ranks join or leave between two steps; if so, the next generation has been entered."""
        slow = {} if self.even else {self.generation.slots[rank] for rank in self.meter.no_good()}
        formed = self.recovery.changed(self.generation, self.now_s, slow)
        return formed is not None and self._formed(*formed)

    def _broken(self, fault: Fault) -> None:
        """Continue after a fault with the ranks that are left, once there are enough of them."""
        self._note(fault)
        if fault.kind != "driver":  # a checkpoint that was waited for, or staged, is given up
            self.now_s = min(self.now_s, max(self.ended_s, fault.time_s))
        begun_s = max(self.now_s, fault.time_s)
        self._formed(*self.recovery.recovered(self.generation, fault, begun_s))

    def _another(self, time_s: float) -> Fault | None:
        """Take the next fault if it strikes before `time_s`, and record it."""
        found = self._fault_before(time_s)
        self._note(found)
        return found

    def _note(self, fault: Fault | None) -> None:
        if fault:
            self.record.events.append(RunEvent(fault.time_s, "fault", fault.kind))

    def _formed(self, generation: SimulatedGeneration, now_s: float, why: str) -> bool:
        """Enter a generation that is formed at `now_s`, or the run's end if that is before. Always true."""
        now_s = min(now_s, self.settings.duration_s or now_s)
        undone = self.record.undo(generation.first)
        self.record.events.append(RunEvent(
            self.now_s, "generation", f"{generation.number}: {why}; "
            f"{counted(generation.size, 'rank')} {'goes' if generation.size == 1 else 'go'} on with step "
            f"{generation.first + 1}" + (f", {undone} steps run again" if undone else ""), now_s - self.now_s))
        self.now_s = self.ended_s = now_s
        self.generation = self._entered(generation)
        return True

    def _holds(self, num_ranks: int) -> bool:
        """Whether so many ranks hold the next two batches: one is planned while the other runs."""
        step = self.generation.newest + 1
        last = step + 1 if self.settings.duration_s else min(step + 1, self.settings.num_batches)
        longest = max(sample.num_tokens for number in (step, last) for sample in self.batches(number))
        return self.machine.holds(num_ranks, longest)


Progress = Callable[[str, int, float], None]  # called with a planner, its step that has ended, and the simulated second


@dataclass
class Simulated:
    """A simulation: its settings, its machine and batches, and the records of the runs so far."""

    settings: Simulation
    machine: SimulatedCluster
    batches: Batches
    records: list[RunRecord] = field(default_factory=list)

    def summaries(self) -> list[dict[str, Any]]:
        return [record.summary(self.machine.memory_bytes, self.settings.cluster.num_ranks) for record in self.records]

    def to_json(self) -> dict[str, Any]:
        """The whole result; the same settings give the same one."""
        first = self.machine.first
        return {
            "modelled": "all times are modelled, none is measured",
            "settings": asdict(self.settings),
            "mode": str(first.mode), "tokens_per_rank": first.limits.tokens,
            "cost": first.cost.to_json(), "longest_tokens": self.batches.longest_tokens,
            "left_out": sorted(self.batches.left_out), "planners": self.summaries(),
            "steps": {record.planner: [step._asdict() for step in record.steps] for record in self.records},
            "events": {record.planner: [event._asdict() for event in record.events] for record in self.records}}


def prepared(settings: Simulation) -> Simulated:
    """Make the machine and the batches. ConfigError, PlanError: what is wrong, or does not fit."""
    shape = ModelShape.load(CONF / "model_shape" / f"{settings.model}.yaml")
    if settings.train.freeze and not shape.vision:
        raise ConfigError(f"train.freeze: got {', '.join(settings.train.freeze)}, and {settings.model} is "
                          "text-only; allowed: nothing")
    if settings.train.expert_parallel not in ("auto", "1") and not shape.experts:
        raise ConfigError(f"train.expert_parallel: got {settings.train.expert_parallel}, and {settings.model} has no "
                          "experts; allowed: auto, 1")
    batches = Batches(Workload(settings.workload, shape.family), settings.global_samples,
                      0 if settings.duration_s else settings.num_batches, settings.seed)
    return Simulated(settings, SimulatedCluster(settings, batches.longest_tokens, batches(1)), batches)


def simulated(simulation: Simulated, progress: Progress = lambda planner, step, now_s: None) -> Iterator[RunRecord]:
    """Run the planners one after the other, and yield the record of each when it ends."""
    for planner in simulation.settings.planners:
        run = SimulatedRun(planner, simulation.machine, simulation.batches, partial(progress, planner))
        simulation.records.append(run.simulate())
        yield simulation.records[-1]


HEAD = ("planner", "step s", "tokens/s", "a rank", "samples/s", "of the first", "computing", "exchange", "update",
        "idle", "waits s", "memory", "faults", "again")
"""`of the first`: tokens/s over the first planner's. `waits s`: for plans, in all. `again`: steps that faults undid."""


def text_of(summaries: Sequence[dict[str, Any]]) -> str:
    """The table, and a line for each planner that could not go on."""
    rows: list[tuple[str, ...]] = [HEAD]
    first = summaries[0]["tokens_per_s"]
    for summary in summaries:
        shares = [f"{100 * summary['shares'].get(name, 0.0):.1f} %"
                  for name in ("compute", "exchange", "update", "idle")]
        rows.append((
            summary["planner"], f"{summary['step_s']:.4g}", f"{summary['tokens_per_s']:,.0f}",
            f"{summary['tokens_per_s_per_rank']:,.0f}", f"{summary['samples_per_s']:.4g}",
            f"{summary['tokens_per_s'] / first:.3f}" if first else "", *shares,
            f"{summary['plan_wait_s']:.3g}", f"{100 * summary['memory_share']:.0f} %",
            str(summary["faults"]), str(summary["steps_run_again"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                       for column, (cell, width) in enumerate(zip(row, widths))) for row in rows]
    lines += [f"{summary['planner']} could not go on after step {summary['steps']}: {summary['error']}"
              for summary in summaries if summary["error"]]
    return "\n".join(lines)


def write_results(simulation: Simulated, folder: Path) -> list[Path]:
    """Write everything; returns the files. OSError: the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(simulation.to_json(), indent=1))
    files = [folder / "results.json"]
    step = next((record.first for record in simulation.records if record.first), None)
    if step:
        results = step.results(1)
        draw_plan(step.plan, folder / "step.png", results, told="simulated")
        details = {"simulated": True, "planner": step.plan.planner, "step": 1}
        (folder / "trace.json").write_text(json.dumps(trace_of(step.plan, results) | {"otherData": details}))
        files += [folder / "step.png", folder / "trace.json"]
    return files
