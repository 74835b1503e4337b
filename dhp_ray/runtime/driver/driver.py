"""The driver: plans every batch, keeps the workers busy, and commits what they finished.

    a thread    |--plan, send n+1--|        |--plan, send n+2--|
    workers     |------ step n ------|------ step n+1 ------|
    commit                            |- n -|

When the group breaks, or ought to change, a new generation takes its place (`recovery`) and goes on with the next step.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import statistics
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import perf_counter

import ray
from ray.actor import ActorHandle

from dhp_ray.config import Config, ConfigError
from dhp_ray.data.errors import BadRows, DataError
from dhp_ray.errors import first_line
from dhp_ray.planner.errors import PlanError
from dhp_ray.run_folder import MODEL_FOLDER
from dhp_ray.runtime.driver.commit import Commits
from dhp_ray.runtime.driver.dispatch import DispatchedStep, RunningStep
from dhp_ray.runtime.driver.elastic import Condition
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle
from dhp_ray.runtime.driver.recovery import DrainingNodes, PendingWorkers, leaving_ranks, reconfigure
from dhp_ray.runtime.driver.session import Session
from dhp_ray.runtime.driver.start import open_session, schedule_step
from dhp_ray.runtime.messages import GroupError, Message, Notice, RunError, RunFinished, StepOrder, StoppingError, Tell
from dhp_ray.runtime.records.lease import Lease
from dhp_ray.runtime.waits import LONG_S, Waits
from dhp_ray.storage import Folder, StorageError
from dhp_ray.train.results import StepResult

MOST_SKIPPED = 20
"""So many updates skipped in a row, because a gradient was not finite, end a run: it is no longer the batch."""

LONG_STEP = 3.0  # the driver reports a wait for a step that takes this many times as long as the slowest recent step


class Driver:
    """Owns the schedule, the data stream and the ledger of one run; `DriverActor` runs it."""

    def __init__(
        self, config: Config, workers: dict[int, ActorHandle], store: tuple[str, int], takes_over: bool,
        lease: Lease | None = None,
    ) -> None:
        """`workers` by slot; `takes_over`: they have the state of a run whose driver is lost."""
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # it would announce that its progress bars are off
        # when several ranks fail together, the driver asks one of them; Ray would print the tracebacks of the others
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
        self.config, self.store, self.takes_over = config, store, takes_over
        self.lease = lease
        self.messages: SimpleQueue[Message] = SimpleQueue()  # for the job's process
        self.tell: Tell = self.messages.put
        self.waits = Waits(self.tell)
        self.group = WorkerGroup([WorkerHandle(slot, actor) for slot, actor in workers.items()], waits=self.waits)
        self.pending, self.draining = PendingWorkers(config.cluster.device, self.tell), DrainingNodes()
        self.session: Session | None = None
        self.stop_reason = ""  # why to end after the step under way, with a checkpoint
        self.refused = ""
        self.leaving: dict[int, Condition] = {}  # ranks that should leave, as of the last step
        self.bad_rows: list[BadRows] = []  # by source, those that do not decode included
        self.counted_step = 0  # the last step whose rows have been counted
        self.num_skipped = 0  # the updates skipped in a row
        self.begun_after = -1  # the step that this start goes on from; -1: that of a lost driver
        self.copies = 0, list[ray.ObjectRef]()  # calls that wait for copies of the state after a step

    def run(self) -> Iterator[Message]:
        """Train to the end; the last message says how it ended."""
        # in a thread, so that its waits can be reported meanwhile
        Thread(target=self._run, name="run", daemon=True).start()
        message: Message | None = None
        while not isinstance(message, RunFinished):
            message = self.messages.get()
            yield message

    def _run(self) -> None:
        try:
            folder = Folder(self.config.run.dir)
            if self.lease:
                folder.before_writing = self.lease.check
            self.session = session = open_session(
                self.config, folder, self.group, self.store, self.pending, self.takes_over, self.tell,
                lambda: self.stop_reason)
            self.commits = Commits(session)
            if not self.takes_over:
                self.begun_after = session.records.last_step
            self.bad_rows = [BadRows(source.path, source.num_rows) for source in session.stream.sources]
            gc.collect()  # otherwise garbage would be frozen too, such as references to blocks
            gc.freeze()  # what is loaded stays; scanning it during a step would hold up every thread
            self._train(session, "the driver was lost" if self.takes_over else "")
        except ConfigError as error:
            self.tell(RunFinished("", str(error), status=2))
        except (RunError, PlanError, DataError, StorageError) as error:
            self.tell(failed(self.session, str(error), goes_on=self.num_skipped < MOST_SKIPPED))
        except BaseException as error:  # a bug of ours: one line for the user, the traceback for a bug report
            traceback.print_exc()
            self.tell(failed(self.session, f"driver: {type(error).__name__}: {error}"))

    def _train(self, session: Session, broken: str) -> None:
        """Run generation after generation until the last step; `broken`: why the current one cannot go on."""
        change, unresponsive = broken, tuple[int, ...]()
        while True:
            try:
                if change:
                    leaving = {} if broken else self.leaving
                    finished = reconfigure(session, self.pending, change, bool(broken), leaving, unresponsive)
                    self.commits.recovered(finished, partial(self._evaluated, session))
                    session.history.stream_lost = False
                broken, unresponsive = "", ()
                change = self._steps(session)
                self.commits.finish_saves()
                if change and self._spares_slow(session):
                    change = self._change(session)
                    if not (change or session.stopping):
                        continue
                if not change:
                    stopping = session.stopping
                    self.commits.save_last()
                    if not (stopping or session.records.has_trained):
                        self.tell(untrained(session))
                        return
                    if not stopping:
                        if session.records.last_step == self.begun_after:
                            self.tell(Notice(f"all {self.begun_after} steps are done, and the model is written again; "
                                             "raise run.steps or run.epochs to train on"))
                        export(session)
                    self.tell(finish(session, stopping))
                    return
            except StoppingError:
                self.tell(finish(session, session.stopping))
                return
            except GroupError as error:
                if self.refused:
                    raise RunError(self.refused) from None
                change = broken = str(error)
                unresponsive = error.unresponsive
                self.commits.forget_saves()

    def _steps(self, session: Session) -> str:
        """Run step after step, to the last one (returns "") or until the membership must change (returns why)."""
        change, self.leaving, self.copies = "", {}, (0, [])
        session.report_mode()
        # kept by no name here: whoever has a dispatched step holds its payload in the object store
        running = self._launch(
            session, self._dispatched(session.current.dispatcher.dispatch, session.records.last_step + 1))
        while running:
            step = running.dispatched.step
            session.current.dispatcher.begin(step + 1)
            with self.waits.on(f"step {step}", max(LONG_S, LONG_STEP * max(session.history.step_times_s, default=0.0))):
                session.history.stuck_s = session.stuck_s(running.dispatched.plan)
                results = session.group.collect(running.results, stuck_s=session.history.stuck_s)
            step_time_s = perf_counter() - running.begun_s
            self._count_skipped_updates(step, results[0])
            following = self._dispatched(session.current.dispatcher.take, step + 1)
            waited_s = perf_counter() - running.begun_s - step_time_s  # for the batch and its plan
            self.leaving = leaving_ranks(session, self.draining)
            mirrored = running.mirrors and results[0].applied
            if mirrored:
                session.mirroring.last = step
            # nothing of a mirrored step is lost with the ranks that leave; but the rest of a drained node may follow
            drained = Condition.DRAINED in self.leaving.values()
            endangered = drained or (bool(self.leaving) and not mirrored)
            self.commits.save_when_due(step, results, running.dispatched.batch.cursor,
                                       last=following is None or bool(session.stopping) or endangered)
            at_end = following is None and session.current.dispatcher.needed_ranks <= session.group.size
            evaluated = self._evaluated(session, step, at_end and not self.refused)
            change = self._change(session)
            goes_on = not (change or session.stopping or self.refused)
            launched = self._launch(session, following if goes_on else None, waited_s)
            if mirrored:
                self._copies_arrived(session)  # previous ones; every rank waited for them in this step
                self.copies = step, session.group.start("mirrored")
                if session.mirroring.every == 1:  # otherwise they may take until the next ones
                    self._copies_arrived(session)
            self.commits.commit(running.finished(results, step_time_s, evaluated))
            running = launched
        self._copies_arrived(session)
        if self.refused:  # also at the first step
            self.commits.save_last()
            raise RunError(self.refused)
        needed = session.current.dispatcher.needed_ranks
        if not change and needed > session.group.size and not session.stopping:
            return f"its state or a sequence of the next batch needs {needed} ranks"
        return change

    def _dispatched(self, dispatch: Callable[[int], DispatchedStep | None], step: int) -> DispatchedStep | None:
        """Return a step; None if there is none, or its batch fails, which is told after the step before."""
        try:
            return None if self.refused else dispatch(step)
        except (DataError, PlanError) as error:
            self.refused = str(error)
            return None

    def _evaluated(self, session: Session, step: int, last: bool = False) -> dict[str, float]:
        """Evaluate if that is due after a step; an error of the held-out data is reported like one of a batch."""
        try:
            return session.current.evaluation.when_due(step, last or step == session.total_steps)
        except GroupError:
            raise
        except (DataError, PlanError, RunError) as error:
            self.refused = str(error)
            return {}

    def _launch(self, session: Session, dispatched: DispatchedStep | None, waited_s: float = 0.0) -> RunningStep | None:
        """Start a dispatched step on all ranks, once each has reported the samples that it cannot decode; None if there
        is none, or the run is to end. `waited_s`: for its batch and plan.
        """
        if dispatched is None:
            return None
        wait = perf_counter()
        try:
            failures = session.current.dispatcher.failures(dispatched)
        except StoppingError:
            return None
        if self.config.data.on_error == "fail":
            for sample_id, reason in (dispatched.batch.skipped | failures).items():
                # reported once the step before is committed and saved
                self.refused = f"sample {sample_id}: {reason} (data.on_error=fail; skip leaves it out)"
                return None
        try:
            self._count_bad_rows(dispatched, failures)
        except DataError as error:
            self.refused = str(error)
            return None
        begun, mirrors = perf_counter(), session.mirroring.due(dispatched.step)
        place = schedule_step(dispatched.step, dispatched.batch.cursor, self.config)
        order = StepOrder(dispatched.step, dispatched.plan_id, failures, place, session.total_steps, mirrors)
        results = session.group.start("run", pickle.dumps(order))  # once; Ray would pickle it for each rank
        session.current.dispatcher.started(dispatched)
        return RunningStep(dispatched, failures, results, begun, waited_s + begun - wait, mirrors)

    def _count_bad_rows(self, dispatched: DispatchedStep, failures: dict[str, str]) -> None:
        """Count the bad rows of a step's batch, once, `failures` to decode included. DataError: too many."""
        if dispatched.step <= self.counted_step:
            return
        self.counted_step = dispatched.step
        reasons = dispatched.batch.skipped | failures
        for source, row, sample_id in dispatched.batch.rows:
            self.bad_rows[source].take(sample_id, reasons.get(sample_id, ""), row)

    def _count_skipped_updates(self, step: int, result: StepResult) -> None:
        """Count the updates skipped in a row; a step without a valid token is none. Too many of them end the run."""
        if result.num_valid_tokens:
            self.num_skipped = 0 if result.applied else self.num_skipped + 1
        if self.num_skipped >= MOST_SKIPPED:
            self.refused = (f"step {step}: the gradient has not been finite in {self.num_skipped} steps in a row, and "
                            "the model stays as it is; allowed: a lower train.learning_rate or other data, and "
                            "another run.dir")

    def _copies_arrived(self, session: Session) -> None:
        """Wait until the newest copies of the state have arrived; how often copies are made may change with this."""
        (step, calls), self.copies = self.copies, (0, [])
        if not calls:
            return
        with self.waits.on(f"the copies of the state after step {step}"):
            seconds = session.group.collect(calls)
        step_s = statistics.median(session.history.step_times_s or [0.0])
        if session.mirroring.observe(seconds, step_s):
            every, copy_s = session.mirroring.every, session.mirroring.copy_s
            session.records.event("mirroring", step=step, every_steps=every, copy_s=round(copy_s, 4),
                                  step_time_s=round(step_s, 4))
            often = "each step" if every == 1 else f"every {every} steps"
            if not session.history.mirroring_told:
                session.history.mirroring_told = True
                self.tell(Notice(
                    f"the state is copied to other ranks after {often} from now on: a copy takes {copy_s:.3g} s, a "
                    f"step {step_s:.3g} s; a lost worker costs the steps since the last copy once more (later changes "
                    "are in events.jsonl)"))

    def _spares_slow(self, session: Session) -> bool:
        """Let slow workers stay whose state neither a mirror nor a checkpoint has; returns whether any stays."""
        step = session.records.last_step
        slow = [rank for rank, condition in self.leaving.items() if condition is Condition.SLOW]
        if not slow or step in (session.mirroring.last, session.checkpoints.newest_step()):
            return False
        for rank in slow:
            del self.leaving[rank]
        return True

    def _change(self, session: Session) -> str:
        """Return why the membership must change between two steps; empty: it need not."""
        if session.stopping:
            return ""
        newcomers = min(len(self.pending.ready()), session.max_workers - session.group.size)
        self.pending.report(session.records)
        if newcomers > 0:
            return f"{newcomers} worker{'s join' if newcomers > 1 else ' joins'}"
        return next((session.group.words(rank, condition) for rank, condition in self.leaving.items()), "")


PICTURE_S = 0.5  # seconds that a run that ends early waits for the picture of a step


def export(session: Session) -> None:
    with session.group.waits.on("the model to be written"):
        session.group.call("export", MODEL_FOLDER)
    session.group.call("leave")


def finish(session: Session, stopping: str) -> RunFinished:
    """Close what the run writes; `stopping`: why it ends early."""
    session.current.dispatcher.stop()
    if not stopping:
        session.stream.close()
    session.close(PICTURE_S if stopping else None)
    if stopping:
        return RunFinished("", f"stopped after step {session.records.last_step}: {stopping}{_way_back(session)}",
                           status=1)
    last_step, total = session.records.last_step, session.total_steps
    fewer = f" after step {last_step} of {total}, since some rows cannot be used (skipped.jsonl)"
    return RunFinished(f"done{fewer if last_step < total else ''}: model in "
                       f"{Folder(session.config.run.dir).child(MODEL_FOLDER).uri}")


def untrained(session: Session) -> RunFinished:
    """End a run whose steps have all been made, and have trained nothing. There is no way back to it."""
    session.close()
    if last_step := session.records.last_step:
        return RunFinished("", f"no step of {last_step} has trained anything: none of their samples can be used, or "
                           "none of their gradients is finite (see skipped.jsonl and events.jsonl); allowed: other "
                           "data or settings, and another run.dir", status=1)
    return RunFinished("", f"batch.global_samples: got {session.config.batch.global_samples}; no epoch has so many "
                       "usable samples, and batch.drop_last=true leaves a smaller batch out", status=1)


def failed(session: Session | None, error: str, goes_on: bool = True) -> RunFinished:
    """End the run with an error. `goes_on`: its newest checkpoint is worth going on from."""
    try:
        if session:
            session.close(PICTURE_S)
        return RunFinished("", f"{error}{_way_back(session) if goes_on else ''}", status=1)
    except Exception as failure:  # most likely the storage, which also caused the error
        besides = "" if first_line(failure) == error else f"; besides: {first_line(failure)}"
        return RunFinished("", f"{error}{besides}", status=1)


def _way_back(session: Session | None) -> str:
    """Say how to continue a run that ended early."""
    newest = session.checkpoints.newest_step() if session else 0
    return f"; the newest checkpoint is step {newest}: start the same command again to go on from it" if newest else ""
