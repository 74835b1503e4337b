"""How a batch gets to the workers: take it from the stream, plan it, write the plan down, send each rank its slice and
its references.

    driver       collects step n ........................| takes n+1, launches it
    threads      batch n+1 -> plan n+1 -> plans/ -> send -> answers
    workers      run n, prefetch n+1                      |

If the plan is not ready when the workers are done, the driver makes a fast, valid plan by the planner's last resort,
and sends it once waiting has cost as much as running that plan would lose (`patience_s`). Every plan that is sent has
its own id; workers run the plan that the driver names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import Lock
from time import monotonic
from typing import Any

import ray

from dhp_ray.comm.group_cache import GroupCacheState
from dhp_ray.config import Config
from dhp_ray.data.blocks import located
from dhp_ray.data.errors import DataError
from dhp_ray.data.stream import GlobalBatch, Stream
from dhp_ray.planner import LAST_RESORT, CostModel, plan_batch
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Plan
from dhp_ray.runtime.driver.feedback import Expectation, patience_s
from dhp_ray.runtime.driver.group import STOP_POLL_S, WorkerGroup
from dhp_ray.runtime.messages import Ran
from dhp_ray.runtime.rank_slices import RowIndex
from dhp_ray.train.results import StepResult

ANSWERS_S = 0.1
"""Seconds that the driver waits for the thread that collects the prefetches' answers; then it collects them itself."""


@dataclass
class DispatchedStep:
    """A planned batch under way to the workers. `prefetches` return the samples that could not be decoded; a thread
    collects them from Ray into `answers`. `late`: the plan is the last resort's.
    """

    step: int
    batch: GlobalBatch
    plan: Plan
    plan_id: str
    late: bool
    prefetches: list[ray.ObjectRef]
    answers: Future[list[dict[str, str]]]


@dataclass
class RunningStep:
    """A step that the workers run: their pending results, and whether they mirror the state after it."""

    dispatched: DispatchedStep
    placeholders: dict[str, str]
    results: list[ray.ObjectRef]
    begun_s: float
    data_wait_s: float
    mirrors: bool

    def finished(self, results: list[StepResult], step_time_s: float,
                 evaluated: Mapping[str, float]) -> FinishedStep:
        dispatched, batch = self.dispatched, self.dispatched.batch
        return FinishedStep(dispatched.step, dispatched.plan, dispatched.plan_id, dispatched.late, batch.epoch,
                            batch.skipped, self.placeholders, results, step_time_s, self.data_wait_s, evaluated)


@dataclass(frozen=True)
class FinishedStep:
    """A step that every rank has applied. `late`: as in DispatchedStep. `results` may lack those of lost ranks."""

    step: int
    plan: Plan
    plan_id: str
    late: bool
    epoch: int
    skipped: dict[str, str]
    placeholders: dict[str, str]
    results: list[StepResult]
    step_time_s: float
    data_wait_s: float = 0.0
    evaluated: Mapping[str, float] = field(default_factory=dict)
    """The results of the evaluation after the step, by their names in metrics.jsonl; empty if there was none."""

    @property
    def generation(self) -> int:
        return int(self.plan_id.split(".")[0])

    @classmethod
    def reported(cls, step: int, plan_file: dict[str, Any], ran: list[Ran]) -> FinishedStep:
        """Build it from the plan file and from what the survivors of a generation report (`ran`, at least one)."""
        batch, results = plan_file["batch"], [found.result for found in ran]
        return cls(step, Plan.from_json(plan_file), plan_file["id"], plan_file["late"], batch["epoch"],
                   dict(batch["skipped"]), ran[0].placeholders, results, max(result.step_time_s for result in results))


@dataclass
class Planning:
    """One step's planning, shared by planning thread and driver: speeds, pool and cost are those of its begin."""

    step: int
    speeds: tuple[float, ...]
    pool: list[tuple[int, ...]]
    cost: CostModel
    reading: Future[GlobalBatch | None] = field(init=False)
    ahead: Future[DispatchedStep | None] = field(init=False)
    sends_ahead: bool = False
    """The planning thread was the first to claim it: it sends the plan, or has sent it."""
    claimed: bool = False
    _lock: Lock = field(default_factory=Lock)

    def claim(self, ahead: bool = False) -> bool:
        """Whether the caller is the first: it alone may send a plan of the step. `ahead`: it is the planning thread."""
        with self._lock:
            first, self.claimed = not self.claimed, True
            self.sends_ahead = self.sends_ahead or (first and ahead)
            return first


class BatchReader:
    """Takes batches from the stream, in a thread of its own. `batches`: those that are not committed, by step: a later
    membership of the group plans them again. `at_end`: there are no more.
    """

    def __init__(self, stream: Stream, config: Config) -> None:
        self.stream, self.config = stream, config
        self.batches: dict[int, GlobalBatch] = {}
        self.at_end = False
        self._thread = ThreadPoolExecutor(1, "reading")

    def idle(self) -> Future[None]:
        """Return a future that is done after whatever is being read."""
        return self._thread.submit(lambda: None)

    def reading(self, step: int) -> Future[GlobalBatch | None]:
        """Return a future of a step's batch, done if it has been taken: the thread may read a later one."""
        if step not in self.batches:
            return self._thread.submit(self._batch, step)
        taken: Future[GlobalBatch | None] = Future()
        taken.set_result(self.batches[step])
        return taken

    def _batch(self, step: int) -> GlobalBatch | None:
        """A step's batch, which an earlier membership may have asked for; None past the last step."""
        if step not in self.batches:
            batch = None if 0 < self.config.run.steps < step else self._next_batch()
            if batch is None:
                self.at_end = True
                return None
            self.batches[step] = batch
        return self.batches[step]

    def _next_batch(self) -> GlobalBatch | None:
        """The next batch of this epoch or the one after; None after `run.epochs`, unless `run.steps` says how far to
        go. If reading fails, the stream goes back: a later membership may ask for the batch again.
        """
        run, size, begin = self.config.run, self.config.batch.global_samples, self.stream.cursor
        try:
            batch = self.stream.next_batch(size)
            if batch is None and (run.steps or self.stream.epoch + 1 < run.epochs):
                self.stream.start_epoch(self.stream.epoch + 1)
                batch = self.stream.next_batch(size)
                if batch is None:
                    raise DataError(f"batch.global_samples: got {size}; no epoch has so many usable samples, and "
                                    "batch.drop_last=true leaves a smaller batch out")
            return batch
        except Exception:
            self.stream.restore(begin)
            raise


@dataclass
class Dispatcher:
    """Plans batch after batch for one membership of the group."""

    reader: BatchReader
    group: WorkerGroup
    cluster: ClusterSpec
    cost: CostModel  # may be replaced between two steps
    config: Config
    pool: GroupCacheState
    """The book of the ranks' group pools, shared by all dispatchers of a generation; `started` advances it."""
    generation: int = 0
    speeds: Callable[[], tuple[float, ...]] | None = None  # of the ranks; None: those of `cluster`
    write_plan: Callable[[int, dict[str, Any]], None] | None = None  # before the step runs
    scale: Callable[[], float | None] = lambda: None  # measured over predicted seconds, None while unknown
    compiled: Future[float] | None = None  # nothing is planned before this is done
    stopping: Callable[[], str] = lambda: ""  # the reason to end the run: then this waits for nothing
    ranks_for: Callable[[int], int] | None = None
    """How many ranks hold a sequence of so many tokens; None: as many as have those of `cluster`."""
    least_ranks: int = 1  # that hold the run's state, with room for packs

    def __post_init__(self) -> None:
        self._planner = ThreadPoolExecutor(1, "planning")
        self._answers = ThreadPoolExecutor(1, "prefetches")
        self._planning: Planning | None = None
        self._failure: Exception | None = None  # of a planner whose plan is no longer waited for
        self._num_sent = 0
        self._expectation = Expectation()

    @property
    def needed_ranks(self) -> int:
        """The number of ranks that the state and the longest waiting sequence need."""
        longest = max((batch.longest for batch in list(self.reader.batches.values())), default=1)
        held = self.ranks_for(longest) if self.ranks_for else -(-longest // self.cluster.most_tokens_per_rank)
        return max(self.least_ranks, held)

    def dispatch(self, step: int) -> DispatchedStep | None:
        """Plan and send a step's batch; None past the last step, for want of ranks, or when the run is to end."""
        self.begin(step)
        return self.take(step)

    def begin(self, step: int) -> None:
        """Start to dispatch a step while another one runs; `take` returns the result."""
        speeds = self.speeds() if self.speeds else self.cluster.speeds
        planning = self._planning = Planning(step, speeds, self.pool.held(), self.cost)
        planning.reading = self.reader.reading(step)
        planning.ahead = self._planner.submit(self._plan_ahead, planning)

    def take(self, step: int) -> DispatchedStep | None:
        """Return the result of `begin(step)`: wait for the batch, and for its plan as long as waiting costs less than
        the last resort (`patience_s`). None as for `dispatch`. GroupError: the group broke meanwhile.
        """
        planning = self._planning
        assert planning is not None
        assert planning.step == step
        if not self._awaited(self._named("the batch", step), planning.reading):
            return None
        batch = planning.reading.result()
        if batch is None or self.needed_ranks > self.cluster.num_ranks:
            return None
        if self.compiled and not self._awaited("the planner's loops, which are being compiled", self.compiled):
            return None
        if self._failure:
            raise self._failure
        if planning.ahead.done():
            return planning.ahead.result()
        begun_s = monotonic()
        last_resort = self._plan(planning, batch, LAST_RESORT)
        expected_s = self._expectation.makespan_s(last_resort.lower_bound_s)
        until_s = begun_s + patience_s(last_resort.predicted_time_s, expected_s, self.scale())
        if not self._awaited(self._named("the plan", step), planning.ahead, lambda: monotonic() >= until_s):
            return None
        if planning.ahead.done() or not planning.claim():  # the thread has sent its plan, is sending it, or has failed
            return planning.ahead.result()
        return self._send(step, batch, last_resort, late=True)

    def started(self, dispatched: DispatchedStep) -> None:
        """Note that the ranks run this step: their pools will hold its groups."""
        deque(self.pool.take(dispatched.plan.process_groups()), maxlen=0)

    def drop(self) -> None:
        """Send no further plan."""
        if self._planning:
            self._planning.claim()

    def stop(self) -> dict[int, GlobalBatch]:
        """Stop planning; returns the batches taken. Waits for one that is being read, unless the run ends."""
        self.end_planning()
        with self.group.waits.on("the batch that is being read"):
            self._wait(self.reader.idle())
        return self.reader.batches

    def failures(self, dispatched: DispatchedStep) -> dict[str, str]:
        """Collect the samples that cannot be used, with reasons. StoppingError: the run is to end."""
        wait([dispatched.answers], timeout=ANSWERS_S)
        if dispatched.answers.done() and not dispatched.answers.exception():
            found = dispatched.answers.result()
        else:
            with self.group.waits.on(self._named("the images", dispatched.step)):
                found = self.group.collect(dispatched.prefetches, stuck_s=self.config.comm.timeout_s, end_stuck=True,
                                           stopping=self.stopping)
        return dict(sorted({name: reason for failed in found for name, reason in failed.items()}.items()))

    def end_planning(self) -> None:
        """Stop planning, after a plan that is being sent: its file would replace that of the step's next plan. A batch
        that is being read joins those of the reader later.
        """
        self.drop()
        self._planner.shutdown(wait=False, cancel_futures=True)
        if self._planning and self._planning.sends_ahead:
            with self.group.waits.on(self._named("the plan file", self._planning.step)):
                self._wait(self._planning.ahead)
        self._answers.shutdown(wait=False)

    def _wait(self, pending: Future[Any]) -> None:
        while not pending.done() and not self.stopping():
            wait([pending], timeout=STOP_POLL_S)

    def _awaited(self, what: str, pending: Future[Any], enough: Callable[[], bool] = lambda: False) -> bool:
        """Wait until `pending` is done, or `enough`; False if the run is to end: no further plan is sent then."""
        with self.group.waits.on(what):
            self.group.wait(pending, lambda: enough() or bool(self.stopping()))
        ends = bool(self.stopping())
        if ends:
            self.drop()
        return not ends

    def _named(self, what: str, step: int) -> str:
        return f"{what} of step {step}" if step > 0 else f"{what} of the held-out samples"

    def _plan_ahead(self, planning: Planning) -> DispatchedStep | None:
        try:
            batch = planning.reading.result()
            if self.compiled:
                self.compiled.result()
            if batch is None or self.needed_ranks > self.cluster.num_ranks or planning.claimed:
                return None
            plan = self._plan(planning, batch, self.config.planner.name)
            self._expectation.observe(plan)
            return self._send(planning.step, batch, plan, late=False) if planning.claim(ahead=True) else None
        except Exception as error:
            if planning.claimed:
                self._failure = error  # the driver has sent another plan; it raises this at the next step
            raise

    def _plan(self, planning: Planning, batch: GlobalBatch, planner: str) -> Plan:
        cluster = replace(self.cluster, speeds=planning.speeds)
        return plan_batch(batch.samples, cluster, planning.cost, planner=planner, sync=self.config.planner.sync,
                          pool=planning.pool, encoder=self.config.planner.encoder)

    def _send(self, step: int, batch: GlobalBatch, plan: Plan, late: bool) -> DispatchedStep:
        """Send a plan. Only the thread that has claimed the step's planning may call this."""
        self._num_sent += 1
        plan_id = f"{self.generation}.{step}.{self._num_sent}"
        if self.write_plan:
            read = {"epoch": batch.epoch, "cursor": batch.cursor,
                    "skipped": list(batch.skipped.items())}
            self.write_plan(step, {"id": plan_id, "late": late, **plan.to_json(), "batch": read,
                                   "activation_checkpointing": self.config.train.activation_checkpointing})
        slices = plan.rank_plans(step, plan_id, with_process_groups=self.config.comm.transport == "pool")
        prefetches = self.group.prefetch(slices, RowIndex(batch.payload, located(batch.origins)))
        return DispatchedStep(step, batch, plan, plan_id, late, prefetches, self._answers.submit(ray.get, prefetches))
