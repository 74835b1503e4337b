"""Writing a finished step down: skipped samples, metrics and, as the last word, the ledger; and checkpoints, whole once every rank has written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import ray

from dhp_ray.planner.plan import Plan
from dhp_ray.runtime.driver.measures import step_extra, step_metrics
from dhp_ray.runtime.driver.recovery import Finished
from dhp_ray.runtime.driver.speeds import busy_s, nominal_compute_s
from dhp_ray.runtime.driver.start import Session
from dhp_ray.runtime.messages import Message, Notice, RunError, StepDone
from dhp_ray.runtime.records.checkpoints import Manifest
from dhp_ray.train.results import StepResult


@dataclass(frozen=True)
class Done:
    """A step that every rank has applied. `late`: on the last resort's plan. `results` may lack those of ranks that were lost since."""

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
    eval_loss: float | None = None

    @classmethod
    def of(cls, finished: Finished, eval_loss: float | None) -> Done:
        """From the plan file and what the survivors of a generation say."""
        file, batch = finished.plan_file, finished.plan_file["batch"]
        results, skipped = [ran.result for ran in finished.ran], [(sample_id, reason) for sample_id, reason in batch["skipped"]]
        return cls(finished.step, finished.plan, file["id"], file["late"], batch["epoch"], skipped, finished.ran[0].placeholders, results,
                   max(result.step_time_s for result in results), eval_loss=eval_loss)


@dataclass
class Commits:
    """The one writer of steps and checkpoints."""

    session: Session
    _saves: list[ray.ObjectRef] = field(default_factory=list)  # calls that stage a checkpoint, between two steps
    _unsealed: dict[int, tuple[Manifest, set[int]]] = field(default_factory=dict)  # saves under way: what to seal, which ranks are done

    def patience_s(self, plan: Plan) -> tuple[float, float]:
        """Seconds after which a step is looked at, and after which a worker that does not get on is stuck: once it is known what predictions are worth."""
        elastic = self.session.config.elastic
        limit_s = max(elastic.hang_s, elastic.hang_factor * plan.predicted_time_s * self.session.scale.value)
        return (limit_s / 2, limit_s) if self.session.scale.ratios else (elastic.hang_s / 2, self.session.config.comm.timeout_s)

    def recovered(self, finished: list[Finished]) -> Iterator[Message]:
        """Commit what the last generation had finished, once the state after it has its copies: from then on it survives another loss."""
        if finished:
            with self.session.group.waits.on(f"the copies of the state after step {finished[-1].step}"):
                self.session.group.call("mirrored")
        for step in finished:
            last = step is finished[-1]
            eval_loss = (yield from self.session.evaluation.loss_when_due(step.step)) if last else None
            yield from self.commit(Done.of(step, eval_loss))

    def commit(self, done: Done) -> Iterator[Message]:
        """Skipped samples, metrics, ledger; then the curves.

        Raises:
            RunError: a rank ran another plan than the one that is written down.
        """
        session, records, plan = self.session, self.session.records, done.plan
        for result in done.results:
            if result.plan_id != done.plan_id:
                raise RunError(f"step {done.step}: rank {result.rank} ran plan {result.plan_id}; the plan file is of {done.plan_id}")
        metrics = step_metrics(plan, done.results, done.step_time_s, session.scale.value, session.generation, done.late)
        metrics |= {} if done.eval_loss is None else {"eval_loss": done.eval_loss}
        extra = step_extra(plan, done.results, done.data_wait_s, done.epoch)
        session.scale.observe(metrics["measured_makespan_s"], plan.predicted_time_s)
        session.step_times_s.append(done.step_time_s)
        for sample_id, reason in [*done.skipped, *done.placeholders.items()]:
            if records.skip(sample_id, reason, done.step, done.epoch):
                yield Notice(f"sample {sample_id} left out: {reason}")
        if not extra["applied"]:
            records.event("update_skipped", step=done.step, gradient_norm=metrics["gradient_norm"], sample_ids=[sample.id for sample in plan.samples])
            yield Notice(f"step {done.step}: the gradient is not finite; update skipped on all ranks")
        records.commit(done.step, [sample.id for sample in plan.samples if sample.id not in done.placeholders], metrics)
        session.dispatcher.batches.pop(done.step, None)
        if plan.cluster.num_ranks == session.group.size and len(done.results) == session.group.size:
            yield from self._observe_speeds(done)
        extra |= {f"speed_{rank}": speed for rank, speed in enumerate(session.meter.planned())}
        session.scalars.step(metrics, extra)
        session.watch.step(done.step, plan, done.results, session.scalars)
        yield StepDone(metrics, extra)
        for result in done.results:
            yield from self._note_saves(result.rank, list(result.saved_steps), result.save_error)

    def save_when_due(self, step: int, last: bool) -> None:
        every = self.session.config.checkpoint.every_steps
        if last or (every and step % every == 0):
            self.save(step)

    def save(self, step: int) -> None:
        """Have all ranks stage their state after `step`; they write it in the background."""
        session = self.session
        cursor = session.records.read_plan(step)["batch"]["cursor"]
        self._unsealed[step] = (Manifest(step, cursor, session.group.size, session.config.planner.sync, session.generation), set())
        with session.group.waits.on("the last checkpoint to be staged"):
            session.group.collect(self._saves)
        self._saves = session.group.start("save", step)  # ranks run it between this step and the next

    def finish_saves(self) -> Iterator[Message]:
        """Wait for the saves under way."""
        group = self.session.group
        with group.waits.on(f"the checkpoint of step {max(self._unsealed, default=0)}"):
            group.collect(self._saves)
            saves = group.call("finish_save")
        for rank, (saved_steps, error) in enumerate(saves):
            yield from self._note_saves(rank, saved_steps, error)

    def forget_saves(self) -> None:
        """The group that wrote them is gone; half-written ones have no manifest."""
        self._saves.clear()
        self._unsealed.clear()

    def _note_saves(self, rank: int, saved_steps: list[int], error: str) -> Iterator[Message]:
        """A checkpoint is whole once every rank has written its part and the manifest stands."""
        session = self.session
        if error:
            session.records.event("save_failed", rank=rank, error=error)
            yield Notice(f"checkpoint not saved (rank {rank}): {error}; the run goes on, the next save is tried")
        for step in saved_steps:
            if step not in self._unsealed:
                continue
            manifest, done = self._unsealed[step]
            done.add(rank)
            if len(done) == manifest.num_ranks:
                session.records.flush()
                not_deleted = session.checkpoints.seal(manifest)
                session.records.event("checkpoint", step=step)
                session.note_not_deleted(not_deleted)
                for failure in not_deleted:
                    yield Notice(f"files of an older checkpoint are left: {failure}")
                del self._unsealed[step]

    def _observe_speeds(self, done: Done) -> Iterator[Message]:
        session = self.session
        session.meter.observe(nominal_compute_s(done.plan, session.cost), busy_s(done.results, session.group.size))
        for rank, slow in session.meter.news().items():
            speed, place = session.meter.measured()[rank], session.group.members[rank].place
            session.records.event("slow" if slow else "no_longer_slow", rank=rank, step=done.step, speed=round(speed, 2))
            yield Notice(f"rank {rank} ({place}) {'is slow' if slow else 'is no longer slow'}: {speed:.2f} of the others' speed; plans follow")

