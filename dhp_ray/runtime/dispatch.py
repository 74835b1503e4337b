"""The way of a batch to the workers: take it from the stream, plan it, send each rank its slice and its references."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import ray

from dhp_ray.comm.book import PoolBook
from dhp_ray.config import Config
from dhp_ray.data.errors import DataError
from dhp_ray.data.mixture import Mixture
from dhp_ray.data.stream import Batch, Stream
from dhp_ray.planner import CostModel, plan_batch
from dhp_ray.planner.plan import ClusterSpec, Plan, RankPlan
from dhp_ray.runtime.group import WorkerGroup
from dhp_ray.runtime.messages import BlockRows


@dataclass
class Dispatched:
    """A planned batch under way to the workers. `failures` come from their prefetch threads."""

    step: int
    batch: Batch
    plan: Plan
    prefetches: list[ray.ObjectRef]


class Dispatcher:
    """Plans batch after batch for one membership of the group."""

    def __init__(self, stream: Stream | Mixture, group: WorkerGroup, cluster: ClusterSpec, cost: CostModel, config: Config) -> None:
        self.stream, self.group, self.cluster, self.cost, self.config = stream, group, cluster, cost, config
        self.pool = PoolBook(config.comm.pool_groups if config.comm.transport == "pool" else 0)  # as every rank's will be once it has run the plans

    def dispatch(self, step: int) -> Dispatched | None:
        """Plan the next batch and send it out; None when the last epoch is over."""
        batch = self._next_batch()
        if batch is None:
            return None
        planner = self.config.planner
        plan = plan_batch(batch.samples, self.cluster, self.cost, planner=planner.name, sync=planner.sync, pool=self.pool.held())
        deque(self.pool.take(plan.process_groups()), maxlen=0)
        rank_plans = [plan.rank_plan(step, rank) for rank in range(self.cluster.num_ranks)]
        prefetches: list[ray.ObjectRef] = [
            worker.prefetch.remote(rank_plan, blocks_of(rank_plan, batch)) for worker, rank_plan in zip(self.group.workers, rank_plans)]
        return Dispatched(step, batch, plan, prefetches)

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

    def failures(self, dispatched: Dispatched) -> dict[str, str]:
        """Samples that no longer can be used, with reasons: known on all ranks before the step starts."""
        merged: dict[str, str] = {}
        for found in self.group.collect(dispatched.prefetches):
            merged |= found
        return dict(sorted(merged.items()))


def blocks_of(rank_plan: RankPlan, batch: Batch) -> list[BlockRows]:
    """The blocks that hold a rank's samples, each once, with the rows that it needs of them."""
    blocks: dict[ray.ObjectRef, list[int]] = {}
    for pack in rank_plan.packs:
        for sample in pack.samples:
            reference, row = batch.payload[sample.id]
            blocks.setdefault(reference, []).append(row)
    return [BlockRows([reference], sorted(rows)) for reference, rows in blocks.items()]
