"""One rank that measures: it runs rounds and passes messages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from math import prod

import numpy as np
import torch

from dhp_ray.comm.progress import StreamTimestamp
from dhp_ray.comm.ranks import numbers_of_ranks
from dhp_ray.measure.rounds import Exchanged, PartResult, Spec, StepTiming
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.loss import IGNORED
from dhp_ray.planner.plan.types import Plan, Sample, encoded_images
from dhp_ray.train.collate import Payload
from dhp_ray.train.rank_step import RankStep
from dhp_ray.train.step_inputs import StepInputs, collated

REPEATED_S = 3.0  # seconds for which a round is repeated, if that allows at least LEAST repeats
LEAST, MOST = 3, 9  # the least and the most repeats of a round
MESSAGE_BYTES = tuple(2**power for power in range(12, 25, 2))
LARGE_BYTES = 2**26  # also passed on a device, whose links need messages of this size to reach their bandwidth
TIMES = 12  # the number of times that a message is passed; the first two do not count


@dataclass
class Member:
    """A rank that measures. Every rank calls each method alike; `stepper`'s state is useless afterwards."""

    rank: int
    spec: Spec
    stepper: RankStep
    precision: str
    warm: bool = False

    def measure(self, part: str) -> PartResult:
        if part == "exchanges":
            return PartResult(exchanged=self._exchanges())
        return PartResult(rounds=[self.repeats(plan) for plan in self.spec.rounds(part)])

    def repeats(self, plan: Plan) -> list[StepTiming]:
        """Run a round as often as there is time for, equally often on every rank."""
        of_rank, device = plan.rank_plan(1, self.rank), self.stepper.device
        payloads = {sample.id: payload_of(sample, self.stepper.adapter, here)
                    for pack in of_rank.packs
                    for sample, here in zip(pack.samples, encoded_images(pack, self.rank))}
        inputs = collated(of_rank, payloads, self.stepper.adapter, self.precision, device.type != "cpu")
        if not self.warm:  # the first steps of a process take longer
            self._run(inputs)
            self.warm = True
        first = self._run(inputs)
        slowest_s = max(self._of_all(first.step_s))
        times = min(MOST, max(LEAST, int(REPEATED_S / max(slowest_s, 1e-6))))
        return [first, *(self._run(inputs) for _ in range(times - 1))]

    def _run(self, inputs: StepInputs) -> StepTiming:
        result = self.stepper.run(inputs, 0.0)  # learning rate 0 leaves the weights unchanged
        return StepTiming(result.step_time_s, result.pack_times)

    def _of_all(self, number: float) -> list[float]:
        """Gather a number from every rank, in order of ranks. Every rank waits here for all others."""
        return numbers_of_ranks(torch.tensor(number, dtype=torch.float64), self.stepper.world,
                                self.stepper.engine.progress)

    def _exchanges(self) -> list[Exchanged]:
        """Pass messages in all rings that the ranks may form; returns the times of this rank."""
        found = []
        sizes = MESSAGE_BYTES if self.stepper.device.type == "cpu" else (*MESSAGE_BYTES, LARGE_BYTES)
        for groups in self.spec.rings():
            self.stepper.transport.prepare(groups)
            own = next((ranks for ranks in groups if self.rank in ranks), None)
            if own is not None:
                across = len({self.spec.nodes[rank] for rank in own}) > 1
                found.append(Exchanged(len(own), across, {size: self._message_s(own, size) for size in sizes}))
            self._of_all(0.0)  # ranks without a group wait here
        return found

    def _message_s(self, ranks: tuple[int, ...], size: int) -> float:
        device, link, times = self.stepper.device, self.stepper.transport.link(ranks, 0), []
        there = torch.zeros(size // 4, device=device)
        here = torch.empty_like(there)
        for _ in range(TIMES):
            begin = StreamTimestamp(device)
            link.exchange([(there, (link.index + 1) % link.size)], [(here, (link.index - 1) % link.size)]).wait()
            times.append(StreamTimestamp(device).since_s(begin))
        return statistics.median(times[2:])


def payload_of(sample: Sample, adapter: LanguageModel, encoded_here: Sequence[bool]) -> Payload:
    """Random tokens and patches for a sample: images between texts in its first half, labels in its second."""
    drawn = np.random.default_rng(sum(map(ord, sample.id)))
    # the lowest ids are plain text in all tokenizers here
    plain = min([adapter.vocabulary_size, *adapter.vision_token_ids])
    half = sample.text_tokens // 2
    pieces = np.array_split(drawn.integers(0, plain, half), max(1, len(sample.vision_grids)))
    images = [np.full(prod(grid) // adapter.merge_area, adapter.vision_token_ids[0]) for grid in sample.vision_grids]
    answer = drawn.integers(0, plain, sample.text_tokens - half)
    ids = np.concatenate([*chain.from_iterable(zip_longest(pieces, images, fillvalue=answer[:0])), answer])
    labels = np.where(np.arange(len(ids)) < len(ids) - len(answer), IGNORED, ids)
    pixels = [drawn.standard_normal((prod(grid), adapter.patch_dim), dtype=np.float32) if here else None
              for grid, here in zip(sample.vision_grids, encoded_here)]
    return Payload(input_ids=ids.astype(np.int32), labels=labels.astype(np.int32),
                   grids=np.array(sample.vision_grids, np.int64).reshape(-1, 3), pixels=list(pixels))
