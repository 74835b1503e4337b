"""One rank's share of a step with `sync=micro_batch`: every rank runs exactly once in each micro-batch.

    micro-batch   0                      1
    rank 0        pack 0, with images    pack 2                 every unit of the model runs on every rank, in the same
    rank 1        pack 0                 idle                 order, forward and backward: a tiny image where a rank has
    rank 2        pack 1, a tiny image   pack 3                 none to encode, an idle token where it has no token

Idle tokens and tiny images come with the inputs (`step_inputs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dhp_ray.comm.link import Link
from dhp_ray.planner.plan import RankPack, RankPlan
from dhp_ray.train.collate import PackInputs
from dhp_ray.train.rank_step import PackRun, RankStep
from dhp_ray.train.sharded_engine import ShardedEngine


class MicroBatchStep(RankStep):
    """Runs the steps of one rank on a sharded engine."""

    engine: ShardedEngine

    def _loss(
        self, plan: RankPlan, pack: RankPack, inputs: PackInputs, link: Link, features: Tensor | None
    ) -> Tensor:
        return self.engine.loss(inputs, link, plan.encodes[pack.micro_batch])

    def _run_pack(
        self, plan: RankPlan, pack: RankPack, feed: Iterator[PackInputs], features: Tensor | None
    ) -> PackRun:
        before = self.engine.blocked_s
        run = super()._run_pack(plan, pack, feed, features)
        return run._replace(gathering_s=self.engine.blocked_s - before)
