"""The inputs of all packs that a rank runs in a step, made before the step by a thread other than the training thread.

    payloads -- collate --> inputs of a pack, patches in the computing type, in pinned memory where a device copies them
    a sample turns out to be a placeholder --> its pack is made again, from what the first inputs hold
    a step runs pack n on the device | the inputs of pack n + 1 are copied to it, in a stream of their own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Pack, RankPlan, Sample, encoded_images
from dhp_ray.train.collate import PackInputs, Payload, collate, placeholder, with_tiny_image
from dhp_ray.train.engine import COMPUTE_TYPES
from dhp_ray.train.images_apart import VisionInputs, vision_inputs

IDLE = Sample("", 1)
"""What a rank without a pack in a micro-batch runs: one token, masked."""


@dataclass
class StepInputs:
    """Inputs in the order in which they run; once all have been added, one for each pack of `packs_of(plan)`.

    `payloads` are those of the packs added so far; their pixels are rows of the inputs, not a second copy.
    """

    plan: RankPlan
    precision: str = "fp32"
    pinned: bool = False
    packs: list[Pack] = field(default_factory=list)
    inputs: list[PackInputs] = field(default_factory=list)
    payloads: dict[str, Payload] = field(default_factory=dict)
    vision: VisionInputs | None = None

    def add_encoded(self, payload_of: Callable[[str], Payload], adapter: LanguageModel) -> None:
        """Collate the images that this rank encodes apart from the packs; call it before any pack is added.
        `payload_of` returns the payload of a sample, by id, when `vision_inputs` asks for it.
        """
        def kept(sample_id: str) -> Payload:
            payload = payload_of(sample_id)
            self.payloads[sample_id] = replace(payload, pixels=list(payload.pixels))  # become rows of a pass's
            return self.payloads[sample_id]

        self.vision = self._encoded(kept, adapter)

    def add(self, pack: Pack, payloads: Mapping[str, Payload], adapter: LanguageModel) -> None:
        """Collate the next pack. Its pixels in `payloads` are no longer needed afterwards. ValueError: the payload of a
        sample is missing or not what was planned.
        """
        # if this rank encodes a sample's images apart, the payload with their pixels is there already
        self.payloads |= {sample.id: payloads[sample.id] for sample in pack.samples
                          if sample.id in payloads and not (self.plan.vision.apart and sample.id in self.payloads)}
        self.inputs.append(self._collated(pack, adapter))
        self.packs.append(pack)

    def mask(self, sample_ids: Iterable[str], adapter: LanguageModel) -> None:
        """Make these samples placeholders: packs that hold one of them are collated again."""
        found = {name for name in sample_ids if name in self.payloads and not self.payloads[name].masked}
        self.payloads |= {name: replace(self.payloads[name], masked=True, pixels=[]) for name in found}
        for place, pack in enumerate(self.packs):
            if any(sample.id in found for sample in pack.samples):
                self.inputs[place] = self._collated(pack, adapter)
        if any(sample.id in found for pack in self.plan.encoded
               for sample, here in zip(pack.samples, encoded_images(pack, self.plan.rank)) if any(here)):
            self.vision = self._encoded(self.payloads.__getitem__, adapter)

    def _encoded(self, payload_of: Callable[[str], Payload], adapter: LanguageModel) -> VisionInputs:
        inputs = vision_inputs(self.plan, payload_of, adapter, COMPUTE_TYPES[self.precision], self.pinned)
        return inputs.map(Tensor.pin_memory) if self.pinned else inputs

    def _collated(self, pack: Pack, adapter: LanguageModel) -> PackInputs:
        apart = self.plan.vision.apart
        inputs = collate(pack, self.payloads, self.plan.rank, adapter, COMPUTE_TYPES[self.precision], self.pinned,
                         self.plan.step, apart)
        patches = iter(inputs.pixels.split([math.prod(grid) for grid in inputs.grids]) if inputs.grids else ())
        for sample, encoded_here in zip(() if apart else pack.samples, encoded_images(pack, self.plan.rank)):
            payload = self.payloads[sample.id]
            if not payload.masked:
                pixels = [next(patches) if here else None for here in encoded_here]
                self.payloads[sample.id] = replace(payload, pixels=pixels)
        known = self.plan.micro_batches
        if known and known[pack.micro_batch].encodes and not inputs.grids and not apart:
            inputs = with_tiny_image(inputs, adapter)
        return inputs.map(Tensor.pin_memory) if self.pinned else inputs


def packs_of(plan: RankPlan) -> list[Pack]:
    """Return the packs that a rank runs: with sync=micro_batch one in each micro-batch, an idle token (index -1) if it
    has none.
    """
    if not plan.micro_batches:
        return list(plan.packs)
    own = {pack.micro_batch: pack for pack in plan.packs}
    return [own.get(number) or Pack((plan.rank,), (), 0.0, micro_batch=number, index=-1, samples=(IDLE,))
            for number in range(len(plan.micro_batches))]


def collated(
    plan: RankPlan, payloads: Mapping[str, Payload], adapter: LanguageModel, precision: str = "fp32",
    pinned: bool = False,
) -> StepInputs:
    """Return the inputs of a whole plan. See `StepInputs.add`."""
    inputs = StepInputs(plan, precision, pinned)
    if plan.vision.apart:
        inputs.add_encoded(payloads.__getitem__, adapter)
    for pack in packs_of(plan):
        inputs.add(pack, {IDLE.id: placeholder(IDLE)} if pack.index < 0 else payloads, adapter)
    return inputs


def copied_ahead(inputs: Sequence[PackInputs], device: torch.device) -> Generator[PackInputs, None, None]:
    """Yield the inputs of each pack on a device. Those of the next pack, and no others, are copied while it computes,
    from when it has done all that it was given before. The host waits for nothing. Close the generator.
    """
    module = torch.get_device_module(device)
    computing, copying = module.current_stream(device), module.Stream(device)
    ahead = _copied(inputs[0], device, computing, copying) if inputs else None
    try:
        for place in range(len(inputs)):
            computing.wait_stream(copying)
            ready, ahead = ahead, None  # the last inputs are freed before room is made for the next
            if place + 1 < len(inputs):
                ahead = _copied(inputs[place + 1], device, computing, copying)
            assert ready is not None
            yield ready
            del ready
    finally:
        computing.wait_stream(copying)  # memory that a copy still writes to must not be reused


def _copied(inputs: PackInputs, device: torch.device, computing: Any, copying: Any) -> PackInputs:
    """Return the inputs on a device, valid once `copying` has got there. Their memory belongs to the computing stream,
    so that later work there can reuse it, although the host is ahead.
    """
    def copy(tensor: Tensor) -> Tensor:
        there = torch.empty_like(tensor, device=device)
        with torch.get_device_module(device).stream(copying):
            return there.copy_(tensor, non_blocking=True)

    copying.wait_stream(computing)
    return inputs.map(copy)
