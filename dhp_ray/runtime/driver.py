"""The driver actor: plans every batch, keeps the workers busy, and commits what they finished.

    dispatch n+1   |--plan, send--|        |--plan, send--|
    workers     |------ step n ------|------ step n+1 ------|
    commit                            |- n -|
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import ray
from ray.actor import ActorHandle

from dhp_ray.config import Config, ConfigError
from dhp_ray.data.errors import DataError
from dhp_ray.planner.plan import PlanError, StepResult
from dhp_ray.runtime.checkpoints import Manifest
from dhp_ray.runtime.dispatch import Dispatched
from dhp_ray.runtime.group import WorkerGroup
from dhp_ray.runtime.measures import TimeScale, step_extra, step_metrics
from dhp_ray.runtime.messages import Finished, Message, Notice, RunError, StepDone
from dhp_ray.runtime.start import Session, open_session
from dhp_ray.storage import Folder, StorageError


@dataclass
class Running:
    """A step that the workers run: their pending results, and when it began."""

    current: Dispatched
    placeholders: dict[str, str]
    results: list[ray.ObjectRef]
    begun_s: float
    data_wait_s: float


class Driver:
    """Owns the schedule, the data stream and the ledger of one run."""

    def __init__(self, config: Config, workers: list[ActorHandle], store: tuple[str, int]) -> None:
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # it would announce that its progress bars are off
        self.config, self.store = config, store
        self.group = WorkerGroup(workers)
        self.scale = TimeScale()
        self.saves: list[ray.ObjectRef] = []  # calls that stage a checkpoint, between two steps
        self.unsealed: dict[int, tuple[Manifest, set[int]]] = {}  # saves under way: what to seal, which ranks are done

    def run(self) -> Iterator[Message]:
        """Train to the end; the last message says how it ended."""
        try:
            self.session: Session = yield from open_session(self.config, self.group, self.store)
            yield from self._train()
        except ConfigError as error:
            yield Finished("", str(error), status=2)
        except (RunError, PlanError, DataError, StorageError) as error:
            yield Finished("", f"{error}{self._way_back()}", status=1)
        except Exception as error:  # a defect of ours: one line for the user, the traceback for the report of it
            traceback.print_exc()
            yield Finished("", f"driver: {type(error).__name__}: {error}{self._way_back()}", status=1)

    def _train(self) -> Iterator[Message]:
        running = self._launch(self._dispatch(self.session.first_step))
        while running:
            following = self._dispatch(running.current.step + 1)  # planned and sent while the workers run
            results: list[StepResult] = self.group.collect(running.results)
            finished, step_time_s = running, perf_counter() - running.begun_s
            self._save_when_due(finished.current, last=following is None)
            eval_loss = yield from self.session.evaluation.loss_when_due(finished.current.step)
            running = self._launch(following)
            yield from self._commit(finished, results, step_time_s, eval_loss)
        yield from self._finish()

    def _dispatch(self, step: int) -> Dispatched | None:
        return self.session.dispatcher.dispatch(step) if step <= self.session.total_steps else None

    def _launch(self, dispatched: Dispatched | None) -> Running | None:
        """Start a dispatched step on all ranks, once each has said which samples it cannot decode."""
        if dispatched is None:
            return None
        wait = perf_counter()
        failures = self.session.dispatcher.failures(dispatched)
        if self.config.data.on_error == "fail":
            for sample_id, reason in [*((skipped.id, skipped.reason) for skipped in dispatched.batch.skipped), *failures.items()]:
                raise RunError(f"sample {sample_id}: {reason} (data.on_error=fail)")
        begun = perf_counter()
        results = self.group.start("run", dispatched.step, frozenset(failures), self.session.total_steps)
        return Running(dispatched, failures, results, begun, begun - wait)

    def _commit(self, finished: Running, results: list[StepResult], step_time_s: float, eval_loss: float | None) -> Iterator[Message]:
        """Write a finished step down: plan, skipped samples, metrics and, as the last word, the ledger."""
        current, records = finished.current, self.session.records
        metrics = step_metrics(current.plan, results, step_time_s, self.scale.value, self.session.generation)
        metrics |= {} if eval_loss is None else {"eval_loss": eval_loss}
        extra = step_extra(current.plan, results, finished.data_wait_s, current.batch.epoch)
        self.scale.observe(metrics["measured_makespan_s"], current.plan.predicted_time_s)
        skipped = [(item.id, item.reason) for item in current.batch.skipped] + list(finished.placeholders.items())
        for sample_id, reason in skipped:
            if records.skip(sample_id, reason, current.step, current.batch.epoch):
                yield Notice(f"sample {sample_id} left out: {reason}")
        if not extra["applied"]:
            records.event("update_skipped", step=current.step, gradient_norm=extra["gradient_norm"], sample_ids=[s.id for s in current.plan.samples])
            yield Notice(f"step {current.step}: the gradient is not finite; update skipped on all ranks")
        records.plan(current.step, current.plan.to_json())
        records.commit(current.step, [s.id for s in current.plan.samples if s.id not in finished.placeholders], metrics)
        self.session.scalars.step(metrics, extra)
        yield StepDone(metrics, extra)
        for rank, result in enumerate(results):
            yield from self._note_saves(rank, list(result.saved_steps), result.save_error)

    def _save_when_due(self, current: Dispatched, last: bool) -> None:
        every = self.config.checkpoint.every_steps
        if last or (every and current.step % every == 0):
            manifest = Manifest(current.step, current.batch.cursor, len(self.group.workers), self.config.planner.sync)
            self.unsealed[current.step] = (manifest, set())
            self.group.collect(self.saves)
            self.saves = self.group.start("save", current.step)  # ranks run it between this step and the next

    def _note_saves(self, rank: int, saved_steps: list[int], error: str) -> Iterator[Message]:
        """A checkpoint is whole once every rank has written its part and the manifest stands."""
        if error:
            self.session.records.event("save_failed", rank=rank, error=error)
            yield Notice(f"checkpoint not saved (rank {rank}): {error}; the run goes on, the next save is tried")
        for step in saved_steps:
            manifest, done = self.unsealed[step]
            done.add(rank)
            if len(done) == len(self.group.workers):
                self.session.records.flush()
                self.session.checkpoints.seal(manifest)
                self.session.records.event("checkpoint", step=step)
                del self.unsealed[step]

    def _finish(self) -> Iterator[Message]:
        self.group.collect(self.saves)
        for rank, (saved_steps, error) in enumerate(self.group.call("finish_save")):
            yield from self._note_saves(rank, saved_steps, error)
        self.group.call("export", "model")
        self.group.call("leave")
        self.session.dispatcher.stream.close()
        self.session.scalars.close()
        self.session.records.close()
        yield Finished(f"done: model in {Folder(self.config.run.dir).child('model').uri}")

    def _way_back(self) -> str:
        """How a run that ended early goes on."""
        session = getattr(self, "session", None)
        newest = session.checkpoints.newest() if session else None
        return f"; the newest checkpoint is step {newest.step}: start the same command again to go on from it" if newest else ""
