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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.comm.progress import Wait
from dhp_ray.planner.plan.types import RankPack, RankPlan
from dhp_ray.train.collate import PackInputs
from dhp_ray.train.encoder_phases import EncoderPhases
from dhp_ray.train.rank_step import PackRun, PhaseRun, RankStep
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.step_inputs import StepInputs


@dataclass
class Waited:
    """What a rank has waited: `waits` on a device, `seconds` on the CPU."""

    waits: list[Wait]
    seconds: float = 0.0


class MicroBatchStep(RankStep):
    """Runs the steps of one rank on a sharded engine."""

    engine: ShardedEngine

    def _loss(self, plan: RankPlan, pack: RankPack, inputs: PackInputs, link: PackCommunicator) -> Tensor:
        return self.engine.loss(inputs, link, plan.encodes[pack.micro_batch])

    def _phase(
        self, inputs: StepInputs, name: str, phases: EncoderPhases, call: Callable[[PackCommunicator], Any]
    ) -> tuple[Any, PhaseRun]:
        self.engine.before_encoding()
        with self._waiting() as waited:
            found, run = super()._phase(inputs, name, phases, call)
        return found, run._replace(waits=(*run.waits, *waited.waits), gathering_s=waited.seconds)

    def _run_pack(
        self, plan: RankPlan, pack: RankPack, feed: Iterator[PackInputs], features: Tensor | None
    ) -> PackRun:
        with self._waiting() as waited:
            run = super()._run_pack(plan, pack, feed, features)
        return run._replace(waits=tuple(waited.waits), gathering_s=waited.seconds)

    @contextmanager
    def _waiting(self) -> Iterator[Waited]:
        """Collect what this rank waits inside for units to be gathered and reduced. On the CPU the collectives count
        it; on a device, where they return at once, the marks between layers do, and the root's waits are left out.
        """
        waited, before_s = Waited([]), self.engine.blocked_s
        if self.device.type == "cpu":
            yield waited
            waited.seconds = self.engine.blocked_s - before_s
        else:
            with self.engine.progress.timed_waits() as waited.waits:
                yield waited
