"""One rank that measures: its engine and its step, and how it runs a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.device import Accelerator
from dhp_ray.comm.link import Link
from dhp_ray.comm.progress import Moment
from dhp_ray.comm.totals import numbers_of_ranks
from dhp_ray.comm.transport import Transport
from dhp_ray.measure.clock import Gauge, QuietCores, gauge_of_process, lost_of, lost_s, lost_since, undisturbed
from dhp_ray.measure.payloads import payload_of
from dhp_ray.measure.rounds import Round, Spec
from dhp_ray.measure.timings import AT_BEST, PackTiming, StepTiming
from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.planner.plan import RankPlan
from dhp_ray.planner.rank_plan import encoded_images
from dhp_ray.planner.work import BACKWARD, ENCODE
from dhp_ray.train.collate import PackInputs
from dhp_ray.train.encoder_phases import EncoderPhases
from dhp_ray.train.engine import Engine
from dhp_ray.train.micro_batch_step import MicroBatchStep
from dhp_ray.train.payload import Payload
from dhp_ray.train.rank_step import PackRun, PhaseRun, RankStep
from dhp_ray.train.step_inputs import StepInputs, collated

LONG_S, QUICK_S = 6.0, 1.5
"""Seconds for which a round is repeated in all passes together, if that allows at least LEAST repeats."""
LEAST, MOST = 3, 9
"""The least and the most repeats of a round in all passes together."""
AGAIN = 3
"""A round runs up to this many times its number of repeats, until enough repeats had cores at their best."""
QUIET_LOOKS, QUICK_LOOKS = 8, 2
"""How often a repeat looks whether all cores are at their best before it begins."""
SLOW_S = 15.0
"""A round that takes longer than this needs one repeat, and is left out of later passes."""


class Watched:
    """Makes a step record, for each pack and phase, the seconds lost to other processes and the processor time of the
    thread.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seen: dict[int, tuple[float, float]] = {}

    @contextmanager
    def _watching(self, number: int) -> Iterator[None]:
        before, computed = lost_s(), time.thread_time()
        yield
        self.seen[number] = lost_since(before), time.thread_time() - computed

    def _run_pack(self, plan: RankPlan, pack: Any, feed: Iterator[PackInputs], features: Tensor | None) -> PackRun:
        with self._watching(pack.index):
            return super()._run_pack(plan, pack, feed, features)  # type: ignore[misc,no-any-return]

    def _phase(
        self, inputs: StepInputs, name: str, phases: EncoderPhases, call: Callable[[Link], Any]
    ) -> tuple[Any, PhaseRun]:
        with self._watching(ENCODE if name == "encoding" else BACKWARD):
            return super()._phase(inputs, name, phases, call)  # type: ignore[misc,no-any-return]


class WatchedStep(Watched, RankStep):
    pass


class WatchedMicroBatchStep(Watched, MicroBatchStep):
    pass


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
    shared_cores: bool = False
    """The ranks of this node share its cores, as they will in training, so the time that they take from each other
    counts.
    """
    preempts: bool = False
    """Every step takes precedence over all other processes."""
    gauge: Gauge | None = field(init=False)
    quiet: QuietCores = field(init=False)
    warm: bool = field(init=False, default=False)
    stepper: WatchedStep | WatchedMicroBatchStep = field(init=False)

    def __post_init__(self) -> None:
        self.gauge = gauge_of_process() if self.device.type == "cpu" and not self.shared_cores else None
        self.quiet = QuietCores(self.slowness, QUICK_LOOKS if self.spec.quick else QUIET_LOOKS)
        kind = WatchedMicroBatchStep if self.spec.sync == "micro_batch" else WatchedStep
        self.stepper = kind(self.adapter, self.engine, self.transport, self.world, self.device)

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The link of a group of ranks over the transport; every rank must call `transport.prepare` for the group
        before.
        """
        return self.transport.link(ranks, 0)

    def lost_since(self, before_s: float) -> float:
        """Seconds lost to other processes since `lost_s()` returned `before_s`; 0 with shared cores or on a device,
        where they are not subtracted.
        """
        return 0.0 if self.shared_cores or self.device.type != "cpu" else lost_since(before_s)

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
        for _ in range((1 if self.spec.quick or self.quiet.hopeless else AGAIN) * times):
            if sum(timing.slowness <= AT_BEST for timing in timings) >= times:
                break
            timings.append(self._run(inputs))
        return [*earlier, *timings]

    def of_all(self, number: float) -> list[float]:
        """Gather a number from every rank, in order of ranks. Every rank waits here for all others."""
        return numbers_of_ranks(torch.tensor(number, dtype=torch.float64), self.world, self.engine.progress)

    def _run(self, inputs: StepInputs) -> StepTiming:
        self.quiet.wait()
        self.stepper.seen.clear()
        before = lost_s()
        with undisturbed(self.preempts):
            result = self.stepper.run(inputs, 0.0)  # learning rate 0 leaves the weights unchanged
        if self.preempts:
            time.sleep(result.step_time_s)  # lets other processes run
        of_packs = {} if self.shared_cores or self.device.type != "cpu" else self.stepper.seen
        phases = zip((ENCODE, BACKWARD), result.encoder_times)
        times = [*((seen.index, seen) for seen in result.pack_times), *phases]
        return StepTiming(result.step_time_s, self.lost_since(before), tuple(
            PackTiming(number, seen.busy_s, seen.blocked_s, lost_of(seen.busy_s, *of_packs.get(number, (0.0, 0.0))),
                       seen.start_s, seen.end_s) for number, seen in times), self.slowness())

    def slowness(self) -> float:
        """The slowness of the slowest rank's core (`Gauge.slowness`); 1 on a device. Every rank waits here for all
        others.
        """
        with undisturbed(self.preempts):
            mine = self.gauge.slowness() if self.gauge else 1.0
        return max(self.of_all(mine))

    def _payloads(self, plan: RankPlan) -> dict[str, Payload]:
        return {sample.id: payload_of(sample, self.adapter, here) for pack in (*plan.packs, *plan.encoded)
                for sample, here in zip(pack.samples, encoded_images(pack, self.rank))}


def seconds_of(device: torch.device, call: Any) -> float:
    """Seconds that a call takes on the device; waits for its end."""
    begin = Moment(device)
    call()
    return Moment(device).since_s(begin)
