"""One rank's share of a step with `sync=micro_batch`: every rank runs exactly once in each micro-batch.

    micro-batch   0                      1
    rank 0        pack 0, with images    pack 2                 every unit of the model runs on every rank, in the same
    rank 1        pack 0                 idle                 order, forward and backward: a tiny image where a rank has
    rank 2        pack 1, a tiny image   pack 3                 none to encode, an idle token where it has no token

Idle tokens and tiny images come with the inputs (`step_inputs.py`). If images are encoded apart from the packs, every
rank runs equally many passes of the encoder before the micro-batches and after them, and none in between:

    rank 0   pass 0, of two images   pass 1, of one   | features | pack 0   pack 2 | gradients | backward of both passes
    rank 1   pass 0, of one          pass 1, tiny     | features | pack 0   idle   | gradients | backward of both passes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from dhp_ray.comm.link import Link
from dhp_ray.planner.plan import RankPack, RankPlan
from dhp_ray.train.collate import PackInputs
from dhp_ray.train.encoder_phases import EncoderPhases
from dhp_ray.train.rank_step import PackRun, PhaseRun, RankStep
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.step_inputs import StepInputs


class MicroBatchStep(RankStep):
    """Runs the steps of one rank on a sharded engine."""

    engine: ShardedEngine

    def _loss(self, plan: RankPlan, pack: RankPack, inputs: PackInputs, link: Link) -> Tensor:
        return self.engine.loss(inputs, link, plan.encodes[pack.micro_batch])

    def _phase(
        self, inputs: StepInputs, name: str, phases: EncoderPhases, call: Callable[[Link], Any]
    ) -> tuple[Any, PhaseRun]:
        self.engine.before_encoding()
        before = self.engine.blocked_s
        found, run = super()._phase(inputs, name, phases, call)
        return found, run._replace(gathering_s=self.engine.blocked_s - before)

    def _run_pack(
        self, plan: RankPlan, pack: RankPack, feed: Iterator[PackInputs], features: Tensor | None
    ) -> PackRun:
        before = self.engine.blocked_s
        run = super()._run_pack(plan, pack, feed, features)
        return run._replace(gathering_s=self.engine.blocked_s - before)
