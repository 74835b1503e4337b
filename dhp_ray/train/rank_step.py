"""One rank's share of one optimizer step: walk the packs of the plan, then reduce and update once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.comm.progress import StreamTimestamp, Wait, seconds_of
from dhp_ray.comm.ranks import numbers_of_ranks, sums_of_counts
from dhp_ray.comm.transport import Transport
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Pack, RankPlan
from dhp_ray.train.activation_offload import PackOffload
from dhp_ray.train.collate import PackInputs
from dhp_ray.train.engine import COMPUTE_TYPES, Engine
from dhp_ray.train.images_apart import EncoderPhases
from dhp_ray.train.pack import pack_loss
from dhp_ray.train.results import ExpertsUsed, PackTime, StepResult
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.step_inputs import StepInputs, copied_ahead


class TimedRun(NamedTuple):
    """A pack, or with index -1 an idle one or a phase of the encoder, that the device has been given."""

    index: int  # type: ignore[assignment]  # in place of a tuple's method
    begin: StreamTimestamp
    end: StreamTimestamp
    waits: list[Wait]
    """In its exchanges, and for units that are gathered and reduced (on devices but for the root)."""

    def time(self, start: StreamTimestamp) -> PackTime:
        """When it ran; waits until the device has run it."""
        return PackTime(self.index, self.begin.since_s(start), self.end.since_s(start), seconds_of(self.waits))


class PackRun(NamedTuple):
    """A pack that the device has been given."""

    timed: TimedRun
    loss: Tensor
    num_valid_tokens: int
    num_images: int
    """Images of the pack's samples, but for placeholders: every rank of the pack has the same number."""
    moved_bytes: int
    """Bytes of activations moved to host memory."""
    routed: Tensor | None
    """This rank's tokens at each expert of each layer."""


PHASE_INDEX = 2**20
"""The index of a phase's link, among those of packs: beyond all of a plan's."""


@dataclass
class RankStep:
    """Runs the steps of one rank. `world` is the group of all ranks (None: there is one rank).

    `before_update` is called after the packs: once `_totals` returns on a rank, `before_update` has returned on every
    rank, and the state has not changed on any.
    """

    adapter: LanguageModel
    engine: Engine
    transport: Transport
    world: dist.ProcessGroup | None
    device: torch.device
    before_update: Callable[[], None] = lambda: None
    offload: PackOffload = field(init=False)

    def __post_init__(self) -> None:
        self.offload = PackOffload(self.adapter, self.device)

    def run(self, inputs: StepInputs, learning_rate_factor: float, data_wait_s: float = 0.0) -> StepResult:
        """Compute losses and gradients of this rank's packs, and update once.

        Between `prepare` and `_totals` a rank exchanges only with the ranks of its packs and, if images are encoded
        apart from packs, with the ranks that encode for it or that it encodes for; apart from that, ranks run
        independently. Every rank enters `_totals` and `update`, even without a pack.
        """
        start, plan = StreamTimestamp(self.device), inputs.plan
        self.engine.progress.stage = f"step {plan.step}"
        self.transport.prepare(plan.process_groups)
        self.engine.zero_gradients()
        runs, encoder_phases = self._run_packs(inputs)
        self.engine.progress.stage = f"step {plan.step}, update"
        with self.engine.progress.waiting("copies of the state before"):
            self.before_update()
        loss_sum, num_valid_tokens, num_images, experts = self._totals(runs)
        update = self.engine.update(num_valid_tokens, learning_rate_factor, uses_vision=num_images > 0)
        return StepResult(
            step=plan.step, rank=plan.rank, loss_sum=loss_sum, num_valid_tokens=num_valid_tokens,
            gradient_norm=update.gradient_norm, learning_rate=update.learning_rate, applied=update.applied,
            state_version=self.engine.state_version, step_time_s=StreamTimestamp(self.device).since_s(start),
            data_wait_s=data_wait_s, pack_times=tuple(run.timed.time(start) for run in runs if run.timed.index >= 0),
            pool=self.transport.counters(), plan_id=plan.plan_id,
            encoder_times=tuple(phase.time(start) for phase in encoder_phases), experts=experts,
            exchanged_bytes=self._exchanged_bytes(inputs), moved_bytes=sum(run.moved_bytes for run in runs))

    @torch.no_grad()
    def evaluate(self, inputs: StepInputs) -> tuple[float, int]:
        """Return the loss sum and the valid tokens of all ranks, without gradients. Every rank calls this."""
        self.engine.progress.stage = f"evaluation {inputs.plan.step}"
        self.transport.prepare(inputs.plan.process_groups)
        return self._totals(self._run_packs(inputs)[0])[:2]

    @torch.no_grad()
    def predictions(self, inputs: StepInputs) -> list[Tensor]:
        """Return for each pack the tokens (K,) that most likely follow its valid ones. Every rank calls this."""
        self.engine.progress.stage = f"answers {inputs.plan.step}"
        self.transport.prepare(inputs.plan.process_groups)
        return [run.loss for run in self._run_packs(inputs)[0]]

    def _run_packs(self, inputs: StepInputs) -> tuple[list[PackRun], list[TimedRun]]:
        """Run the packs in their order, and around them the phases in which images are encoded apart."""
        phases, times = self._phases(inputs), []
        features: list[Tensor | None] = [None] * len(inputs.packs)
        if phases:
            features, time = self._phase(inputs, "encoding", phases.encode)
            times.append(time)
        on_host = self.device.type == "cpu"
        with closing((own for own in inputs.inputs) if on_host else copied_ahead(inputs.inputs, self.device)) as feed:
            runs = [self._run_pack(inputs.plan, pack, feed, own)
                    for pack, own in zip(inputs.packs, features, strict=True)]
        if phases and torch.is_grad_enabled() and self.adapter.trains("vision"):
            del features  # `phases` has them
            _, time = self._phase(inputs, "encoder backward", phases.backward)
            times.append(time)
        return runs, times

    def _phases(self, inputs: StepInputs) -> EncoderPhases | None:
        if inputs.vision is None:
            return None
        return EncoderPhases(self.adapter, inputs.vision, inputs.plan.vision.keeps,
                             [own.received_from for own in inputs.inputs], self.device)

    def _phase(
        self, inputs: StepInputs, name: str, phase: Callable[[PackCommunicator], Any]
    ) -> tuple[Any, TimedRun]:
        """Run one of the phases, in which all ranks may exchange."""
        self.engine.progress.stage = f"step {inputs.plan.step}, {name}"
        self.engine.progress.mark("inputs")
        ranks = range(dist.get_world_size(self.world)) if self.world else (inputs.plan.rank,)
        link = self.transport.link(ranks, PHASE_INDEX)
        return self._timed(-1, lambda: phase(link))

    def _timed(self, index: int, call: Callable[[], Any]) -> tuple[Any, TimedRun]:
        """Return what `call` has returned, and its time."""
        begin = StreamTimestamp(self.device)
        with self.engine.progress.timed_waits() as waits:
            found = call()
        return found, TimedRun(index, begin, StreamTimestamp(self.device), waits)

    def _exchanged_bytes(self, inputs: StepInputs) -> int:
        """Return the bytes of features that this rank sends to others before the packs."""
        if inputs.vision is None:
            return 0
        rows = sum(len(index) for rank, index in inputs.vision.send_index.items() if rank != inputs.plan.rank)
        return rows * self.adapter.feature_width * COMPUTE_TYPES[inputs.precision].itemsize

    def _loss(self, plan: RankPlan, pack: Pack, inputs: PackInputs, link: PackCommunicator) -> Tensor:
        return pack_loss(self.adapter, inputs, link)

    def _run_pack(
        self, plan: RankPlan, pack: Pack, feed: Iterator[PackInputs], features: Tensor | None
    ) -> PackRun:
        self.engine.progress.stage = f"step {plan.step}, pack {pack.index}"
        self.engine.progress.mark("inputs")
        inputs = next(feed)
        routing = self.adapter.routing(inputs.sequence_of, inputs.sequences) if torch.is_grad_enabled() else None
        inputs = replace(inputs, features=features, routing=routing)
        link = self.transport.link(pack.ranks, pack.index)

        def run() -> Tensor:
            with self.offload.of_pack(inputs), self.adapter.recomputing(inputs.recomputed):
                loss = self._loss(plan, pack, inputs, link)
            if torch.is_grad_enabled():
                self.offload.backward(loss)
            return loss.detach()

        loss, timed = self._timed(pack.index, run)
        return PackRun(timed, loss, inputs.num_valid_tokens, inputs.num_images, self.offload.moved_bytes,
                       routing.totals() if routing else None)

    def _totals(self, runs: Sequence[PackRun]) -> tuple[float, int, int, ExpertsUsed | None]:
        """Return the sums of loss, valid tokens and images over all ranks, and how evenly experts were used. The host
        waits here for the device. An image counts once on each rank of its pack: only whether there are any matters.
        """
        progress = self.engine.progress
        losses: list[float] = progress.read(torch.stack([run.loss for run in runs])) if runs else []
        loss_sum = torch.tensor(sum(losses), dtype=torch.float64)
        counts = [sum(run.num_valid_tokens for run in runs), sum(run.num_images for run in runs)]
        total = sum(numbers_of_ranks(loss_sum, self.world, progress))
        num_valid_tokens, num_images, *routed = sums_of_counts([*counts, *self._routed(runs)], self.world, progress)
        return total, num_valid_tokens, num_images, ExpertsUsed.of(
            np.array(routed).reshape(-1, self.adapter.num_experts)) if routed else None

    def _routed(self, runs: Sequence[PackRun]) -> list[int]:
        """Return this rank's tokens at each expert of each layer, one after the other; equally many on all ranks."""
        if not self.adapter.num_experts or not torch.is_grad_enabled():
            return []
        layers = sum(layer.count for layer in self.adapter.shape.language if layer.experts)
        counts = torch.zeros(layers, self.adapter.num_experts, dtype=torch.int64, device=self.device)
        for run in runs:
            counts += 0 if run.routed is None else run.routed
        return self.engine.progress.read(counts.flatten())


class MicroBatchStep(RankStep):
    """Runs the steps of one rank with `sync=micro_batch`, on a sharded engine: every rank runs exactly once in each
    micro-batch.

        micro-batch   0                      1
        rank 0        pack 0, with images    pack 2           every unit of the model runs on every rank, in the same
        rank 1        pack 0                 idle             order, forward and backward: a tiny image where a rank has
        rank 2        pack 1, a tiny image   pack 3           none to encode, an idle token where it has no token

    Idle tokens and tiny images come with the inputs (`step_inputs.py`). If images are encoded apart from the packs,
    every rank runs equally many passes of the encoder before the micro-batches and after them, and none in between:

        rank 0   pass 0, of two images   pass 1   | features | pack 0   pack 2 | gradients | backward of both passes
        rank 1   pass 0, of one      pass 1, tiny | features | pack 0   idle   | gradients | backward of both passes
    """

    engine: ShardedEngine

    def _run_packs(self, inputs: StepInputs) -> tuple[list[PackRun], list[TimedRun]]:
        """Run them again if more tokens came to some rank's experts than there was room for."""
        found, parallel = super()._run_packs(inputs), self.engine.expert_parallel
        while parallel and parallel.needs_more_room(self.world):
            self.engine.zero_gradients()
            found = super()._run_packs(inputs)
        return found

    def _run_pack(
        self, plan: RankPlan, pack: Pack, feed: Iterator[PackInputs], features: Tensor | None
    ) -> PackRun:
        """Ranks that share experts meet in layers that run again, and hold tokens of other packs: they relieve all
        packs of a micro-batch alike.
        """
        if self.engine.expert_parallel:
            known = plan.micro_batches[pack.micro_batch]
            self.engine.expert_parallel.group.num_tokens = known.most_tokens
            feed = (replace(inputs, offload=known.offload, recomputed=known.recomputed) for inputs in feed)
        return super()._run_pack(plan, pack, feed, features)

    def _loss(self, plan: RankPlan, pack: Pack, inputs: PackInputs, link: PackCommunicator) -> Tensor:
        return self.engine.loss(inputs, link, plan.micro_batches[pack.micro_batch].encodes)

    def _phases(self, inputs: StepInputs) -> EncoderPhases | None:
        self.engine.before_encoding()
        return super()._phases(inputs)
