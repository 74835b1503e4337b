"""The way of a batch to the workers: take it from the stream, plan it, send each rank its slice and its references."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from dhp_ray.data.stream import Batch, Stream
from dhp_ray.planner import CostModel, plan_batch
from dhp_ray.planner.plan import ClusterSpec, Plan, RankPlan
from dhp_ray.runtime.group import WorkerGroup
from dhp_ray.runtime.prefetch import BlockRows


@dataclass
class Dispatched:
    """A planned batch under way to the workers. `failures` come from their prefetch threads."""

    step: int
    batch: Batch
    plan: Plan
    prefetches: list[ray.ObjectRef]


class Dispatcher:
    """Plans batch after batch for one membership of the group."""

    def __init__(self, stream: Stream, group: WorkerGroup, cluster: ClusterSpec, cost: CostModel, planner: str, sync: str, global_samples: int, epochs: int) -> None:
        self.stream, self.group, self.cluster, self.cost = stream, group, cluster, cost
        self.planner, self.sync, self.global_samples, self.epochs = planner, sync, global_samples, epochs

    def dispatch(self, step: int) -> Dispatched | None:
        """Plan the next batch and send it out; None when the last epoch is over."""
        batch = self.stream.next_batch(self.global_samples)
        while batch is None and self.stream.epoch + 1 < self.epochs:
            self.stream.start_epoch(self.stream.epoch + 1)
            batch = self.stream.next_batch(self.global_samples)
        if batch is None:
            return None
        plan = plan_batch(batch.samples, self.cluster, self.cost, planner=self.planner, sync=self.sync)
        rank_plans = [plan.rank_plan(step, rank) for rank in range(self.cluster.num_ranks)]
        prefetches = [worker.prefetch.remote(rank_plan, blocks_of(rank_plan, batch)) for worker, rank_plan in zip(self.group.workers, rank_plans)]
        return Dispatched(step, batch, plan, prefetches)

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
