"""One rank's share of a step with `sync=micro_batch`: every rank runs exactly once in each micro-batch.

    micro-batch   0                      1
    rank 0        pack 0, with images    pack 2                 every unit of the model runs on every rank, in the same
    rank 1        pack 0                 idle                 order, forward and backward: a tiny image where a rank has
    rank 2        pack 1, a tiny image   pack 3                 none to encode, an idle token where it has no token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dhp_ray.comm.link import Link
from dhp_ray.planner.plan import RankPack, RankPlan, Sample
from dhp_ray.train.collate import PackInputs, Payload, placeholder, with_tiny_image
from dhp_ray.train.rank_step import PackRun, RankStep
from dhp_ray.train.sharded_engine import ShardedEngine

IDLE = Sample("", 1)
"""What a rank without a pack runs: one token, masked."""


class MicroBatchStep(RankStep):
    """Runs the steps of one rank on a sharded engine."""

    engine: ShardedEngine

    def _packs(self, plan: RankPlan) -> Sequence[RankPack]:
        own = {pack.micro_batch: pack for pack in plan.packs}
        return [own.get(index) or RankPack(-1, (plan.rank,), (IDLE,), (), 0.0, index)
                for index in range(plan.num_micro_batches)]

    def _loss(self, plan: RankPlan, pack: RankPack, inputs: PackInputs, link: Link) -> Tensor:
        return self.engine.loss(inputs, link, plan.encodes[pack.micro_batch])

    def _collate(self, plan: RankPlan, pack: RankPack, payloads: Mapping[str, Payload]) -> PackInputs:
        inputs = super()._collate(plan, pack, {**payloads, IDLE.id: placeholder(IDLE)})
        if plan.encodes[pack.micro_batch] and not inputs.grids:
            return with_tiny_image(inputs, self.adapter)
        return inputs

    def _run_pack(self, plan: RankPlan, pack: RankPack, payloads: Mapping[str, Payload]) -> PackRun:
        before = self.engine.blocked_s
        run = super()._run_pack(plan, pack, payloads)
        return run._replace(gathering_s=self.engine.blocked_s - before)
