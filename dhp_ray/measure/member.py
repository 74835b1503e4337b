"""One rank that measures: its engine and its step, and how it runs a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dhp_ray.comm.device import Accelerator
from dhp_ray.comm.link import Link
from dhp_ray.comm.progress import Moment
from dhp_ray.comm.totals import numbers_of_ranks
from dhp_ray.comm.transport import Transport
from dhp_ray.measure.payloads import payload_of
from dhp_ray.measure.rounds import Round, Spec
from dhp_ray.measure.timings import PackTiming, StepTiming
from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.planner.plan import RankPlan
from dhp_ray.planner.rank_plan import encoded_images
from dhp_ray.planner.work import BACKWARD, ENCODE
from dhp_ray.train.engine import Engine
from dhp_ray.train.micro_batch_step import MicroBatchStep
from dhp_ray.train.payload import Payload
from dhp_ray.train.rank_step import RankStep
from dhp_ray.train.step_inputs import StepInputs, collated

LONG_S, QUICK_S = 6.0, 1.5
"""Seconds for which a round is repeated in all passes together, if that allows at least LEAST repeats."""
LEAST, MOST = 3, 9
"""The least and the most repeats of a round in all passes together."""
SLOW_S = 15.0
"""A round that takes longer than this needs one repeat, and is left out of later passes."""


@dataclass
class Member:
    """A rank of a world that exists only for measuring: its engine's state is useless afterwards."""

    rank: int
    spec: Spec
    adapter: ModelAdapter
    engine: Engine
    transport: Transport
    world: dist.ProcessGroup | None
    accelerator: Accelerator
    device: torch.device
    precision: str
    warm: bool = field(init=False, default=False)
    stepper: RankStep = field(init=False)

    def __post_init__(self) -> None:
        kind = MicroBatchStep if self.spec.sync == "micro_batch" else RankStep
        self.stepper = kind(self.adapter, self.engine, self.transport, self.world, self.device)

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The link of a group of ranks over the transport; every rank must call `transport.prepare` for the group
        before.
        """
        return self.transport.link(ranks, 0)

    def timed(self, round_: Round, earlier: Sequence[StepTiming] = ()) -> list[StepTiming]:
        """Run a round as often as a pass has time for, equally often on every rank. Returns the timings of `earlier`
        passes and the new ones.
        """
        if earlier and max(self.of_all(earlier[0].step_s)) > SLOW_S:
            return list(earlier)
        plan = round_.plan.rank_plan(1, self.rank)
        inputs = collated(plan, self._payloads(plan), self.adapter, self.precision, self.device.type != "cpu")
        if not self.warm:  # the first steps of a process take longer
            self._run(inputs)
            self.warm = True
        timings = [self._run(inputs)]
        slowest_s = max(self.of_all(timings[0].step_s))
        budget_s, passes = QUICK_S if self.spec.quick else LONG_S, self.spec.num_passes
        least = 1 if slowest_s > SLOW_S else LEAST // passes
        times = min(MOST // passes, max(least, int(budget_s / passes / max(slowest_s, 1e-6))))
        return [*earlier, *timings, *(self._run(inputs) for _ in range(times - 1))]

    def of_all(self, number: float) -> list[float]:
        """Gather a number from every rank, in order of ranks. Every rank waits here for all others."""
        return numbers_of_ranks(torch.tensor(number, dtype=torch.float64), self.world, self.engine.progress)

    def _run(self, inputs: StepInputs) -> StepTiming:
        result = self.stepper.run(inputs, 0.0)  # learning rate 0 leaves the weights unchanged
        phases = zip((ENCODE, BACKWARD), result.encoder_times)
        times = [*((seen.index, seen) for seen in result.pack_times), *phases]
        return StepTiming(result.step_time_s, tuple(
            PackTiming(number, seen.busy_s, seen.blocked_s, seen.start_s, seen.end_s) for number, seen in times))

    def _payloads(self, plan: RankPlan) -> dict[str, Payload]:
        return {sample.id: payload_of(sample, self.adapter, here) for pack in (*plan.packs, *plan.encoded)
                for sample, here in zip(pack.samples, encoded_images(pack, self.rank))}


def seconds_of(device: torch.device, call: Any) -> float:
    """Seconds that a call takes on the device; waits for its end."""
    begin = Moment(device)
    call()
    return Moment(device).since_s(begin)
