"""The way of a batch to the workers: take it from the stream, plan it, write the plan down, send each rank its slice and its references.

    driver       collects step n ........................| takes n+1, launches it
    a thread     batch n+1 -> plan n+1 -> plans/ -> send  |
    workers      run n, prefetch n+1                      |

Planning that is not done when the workers are is dropped for the planner's last resort, a fast valid plan; `late_plans` counts them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import Any

import ray

from dhp_ray.comm.book import PoolBook
from dhp_ray.config import Config
from dhp_ray.data.errors import DataError
from dhp_ray.data.mixture import Mixture
from dhp_ray.data.stream import Batch, Stream
from dhp_ray.planner import LAST_RESORT, CostModel, plan_batch
from dhp_ray.planner.plan import ClusterSpec, Plan, RankPlan
from dhp_ray.runtime.group import WorkerGroup
from dhp_ray.runtime.messages import BlockRows

LATE_SHARE = 0.02
LATE_S = 0.01
"""A plan may come so much later than the results of the step before: this share of its step's seconds, or this many."""

WritePlan = Callable[[int, dict[str, Any]], None]


@dataclass
class Dispatched:
    """A planned batch under way to the workers. `prefetches` return what their prefetch threads could not decode."""

    step: int
    batch: Batch
    plan: Plan
    prefetches: list[ray.ObjectRef]


class Dispatcher:
    """Plans batch after batch for one membership of the group.

    `batches` are those taken from the stream and not committed yet, by step: a later membership plans them again.
    `speeds` tells those of the ranks; `write_plan` keeps the plan of a step before the step runs.
    """

    def __init__(self, stream: Stream | Mixture, group: WorkerGroup, cluster: ClusterSpec, cost: CostModel, config: Config,
                 speeds: Callable[[], tuple[float, ...]] | None = None, write_plan: WritePlan | None = None,
                 batches: dict[int, Batch] | None = None) -> None:
        self.stream, self.group, self.cluster, self.cost, self.config = stream, group, cluster, cost, config
        self.speeds, self.write_plan, self.batches = speeds, write_plan, batches or {}
        self.pool = PoolBook(config.comm.pool_groups if config.comm.transport == "pool" else 0)  # as every rank's will be once it has run the plans
        self.late_plans = 0
        self.at_end = False
        self._thread = ThreadPoolExecutor(1, "planning")
        self._ahead: Future[Dispatched | None] | None = None
        self._lock, self._batch_there = Lock(), Event()
        self._dropped = self._sent = False

    @property
    def needed_ranks(self) -> int:
        """Ranks that the longest sequence waiting needs."""
        longest = max((sample.num_tokens for batch in list(self.batches.values()) for sample in batch.samples), default=1)
        return -(-longest // self.cluster.tokens_per_rank)

    def dispatch(self, step: int) -> Dispatched | None:
        """Plan a step's batch and send it out; None past the last step, or when the batch needs more ranks than there are."""
        self.begin(step)
        return self.take(step)

    def begin(self, step: int) -> None:
        """Dispatch a step in the planning thread; `take` has what it came to."""
        self._batch_there.clear()
        self._dropped = self._sent = False
        self._ahead = self._thread.submit(self._dispatch_ahead, step)

    def take(self, step: int, step_time_s: float = math.inf) -> Dispatched | None:
        """What `begin(step)` came to, at once where a step before it took `step_time_s`. A batch that is not there yet is waited for.

        Raises:
            GroupError: the group broke meanwhile.
        """
        ahead = self._ahead
        assert ahead is not None
        with self.group.waits.on(self._named("the batch", step)):
            self.group.wait(ahead, self._batch_there.is_set)
        with self.group.waits.on(self._named("the plan", step)):
            wait([ahead], timeout=None if step_time_s == math.inf else max(LATE_S, LATE_SHARE * step_time_s))
        with self._lock:  # either the thread has sent its plan by now, or it will not
            late = not ahead.done() and not self._sent
            self._dropped = late
        if not late:
            return ahead.result()
        self.late_plans += 1
        return self._send(step, self.batches[step], self._plan(self.batches[step], LAST_RESORT[self.config.planner.sync]))

    def drop(self) -> None:
        """Send no further plan."""
        with self._lock:
            self._dropped = True

    def stop(self) -> dict[int, Batch]:
        """Plan no more; the batches that have been taken from the stream. Waits for one that is being read."""
        self.drop()
        with self.group.waits.on("the batch that is being read"):
            self._thread.shutdown(wait=True)
        return self.batches

    def failures(self, dispatched: Dispatched) -> dict[str, str]:
        """Samples that no longer can be used, with reasons: known on all ranks before the step starts."""
        merged: dict[str, str] = {}
        with self.group.waits.on(self._named("the images", dispatched.step)):
            found = self.group.collect(dispatched.prefetches, stuck_s=self.config.comm.timeout_s, end_stuck=True)
        for failed in found:
            merged |= failed
        return dict(sorted(merged.items()))

    def _named(self, what: str, step: int) -> str:
        return f"{what} of step {step}" if step > 0 else f"{what} of the held-out samples"

    def _dispatch_ahead(self, step: int) -> Dispatched | None:
        batch = self._batch(step)
        self._batch_there.set()
        if batch is None or self.needed_ranks > self.cluster.num_ranks:
            return None
        plan = self._plan(batch, self.config.planner.name)
        with self._lock:
            if self._dropped:
                return None
            self._sent = True
        return self._send(step, batch, plan)

    def _plan(self, batch: Batch, planner: str) -> Plan:
        cluster = replace(self.cluster, speeds=self.speeds()) if self.speeds else self.cluster
        return plan_batch(batch.samples, cluster, self.cost, planner=planner, sync=self.config.planner.sync, pool=self.pool.held())

    def _send(self, step: int, batch: Batch, plan: Plan) -> Dispatched:
        deque(self.pool.take(plan.process_groups()), maxlen=0)
        if self.write_plan:
            self.write_plan(step, plan.to_json() | {"batch": {
                "epoch": batch.epoch, "cursor": batch.cursor, "skipped": [[skipped.id, skipped.reason] for skipped in batch.skipped]}})
        prefetches: list[ray.ObjectRef] = [member.actor.prefetch.remote(rank_plan, blocks_of(rank_plan, batch))
                                           for member, rank_plan in zip(self.group.members, plan.rank_plans(step), strict=True)]
        return Dispatched(step, batch, plan, prefetches)

    def _batch(self, step: int) -> Batch | None:
        """The batch of a step: the one that an earlier membership had taken, else the stream's next one; None past the last step."""
        if 0 < self.config.run.steps < step:
            self.at_end = True
            return None
        if step not in self.batches:
            batch = self._next_batch()
            if batch is None:
                self.at_end = True
                return None
            self.batches[step] = batch
        return self.batches[step]

    def _next_batch(self) -> Batch | None:
        """The next batch of this epoch or the one after; None after `run.epochs`, unless `run.steps` says how far to go."""
        run, batch = self.config.run, self.stream.next_batch(self.config.batch.global_samples)
        while batch is None:
            if not run.steps and self.stream.epoch + 1 >= run.epochs:
                return None
            self.stream.start_epoch(self.stream.epoch + 1)
            batch = self.stream.next_batch(self.config.batch.global_samples)
            if batch is None:
                raise DataError(f"batch.global_samples: got {self.config.batch.global_samples}; no epoch has so many usable samples, and "
                                "batch.drop_last=true leaves a smaller batch out")
        return batch


def blocks_of(rank_plan: RankPlan, batch: Batch) -> list[BlockRows]:
    """The blocks that hold a rank's samples, each once, with the rows that it needs of them."""
    blocks: dict[ray.ObjectRef, list[int]] = {}
    for pack in rank_plan.packs:
        for sample in pack.samples:
            reference, row = batch.payload[sample.id]
            blocks.setdefault(reference, []).append(row)
    return [BlockRows([reference], sorted(rows)) for reference, rows in blocks.items()]
