"""Peak memory of a whole step whose images are encoded apart from its packs, on fake tensors (`memory_trace`): of the
one rank that there is, or with sync=micro_batch of rank 0 in a `fake_world`, which runs each pack in a micro-batch."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from dhp_ray.model.build import meta_model
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.memory.model import MemorySettings
from dhp_ray.planner.plan.types import Grid, Pack, RankPlan, Sample, VisionPlan
from dhp_ray.train.collate import PackInputs, Payload, collate
from dhp_ray.train.engine import COMPUTE_TYPES
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.images_apart import EncoderPass, EncoderPhases, VisionInputs, vision_inputs
from dhp_ray.train.pack import pack_loss
from dhp_ray.train.sharded_engine import ShardedEngine, narrow_frozen
from dhp_ray.train.state.optimizer import OptimizerSettings
from tests.memory_trace import SilentLink, memory_trace


class TracedPhases(EncoderPhases):
    """Copies a pass's pixels to the device, as where that is not the CPU."""

    compute_type: torch.dtype

    def _encode(self, images: EncoderPass) -> Tensor:
        return self._adapter.encode(torch.empty(images.pixels.shape, dtype=self.compute_type), images.encoder)


def traced_step(
    config: PreTrainedConfig, packs: Sequence[Sequence[tuple[int, Sequence[Grid]]]], settings: MemorySettings,
    vision: VisionPlan,
) -> int:
    """The most bytes that a step adds to what one rank holds between steps, which encodes the images of all of its
    packs; these are given as samples, of (text tokens, grids of images). Passes that ranks run in lockstep have an
    image each, in turn."""
    adapter = meta_model(config)
    adapter.freeze(settings.frozen)
    if settings.recomputes:
        adapter.set_activation_checkpointing()
    rank_packs, payloads = [], {}
    for index, samples in enumerate(packs):
        made = [sample_of(f"{index}.{place}", text, grids, adapter) for place, (text, grids) in enumerate(samples)]
        payloads |= {sample.id: payload for sample, payload in made}
        count, before = sum(len(grids) for _, grids in samples), sum(len(pack.encoders) for pack in rank_packs)
        passes = tuple((before + image) % vision.num_passes for image in range(count)) if vision.num_passes else ()
        rank_packs.append(Pack((0,), (), 1.0, encoders=(0,) * count, passes=passes, index=index,
                               samples=tuple(sample for sample, _ in made)))
    plan = RankPlan(1, 0, (), tuple(rank_packs), (), "", vision, tuple(pack for pack in rank_packs if pack.encoders))
    images = vision_inputs(plan, payloads.__getitem__, adapter)
    inputs = [collate(pack, payloads, 0, adapter, apart=True) for pack in rank_packs]
    with memory_trace() as trace:
        engine = engine_of(adapter, settings)
        engine.zero_gradients()
        for _ in range(1 if settings.sync == "step" else 2):  # FSDP has gradients from the first backward pass on
            gc.collect()
            before_bytes = trace.live_bytes
            trace.begin()
            run_step(adapter, engine, images, inputs, settings, vision)
        step_bytes = trace.peak_bytes - before_bytes
        engine.release()
    return step_bytes


def engine_of(adapter: LanguageModel, settings: MemorySettings) -> Any:
    """With parameters as they come, under a trace."""
    optimizer = OptimizerSettings(lambda name: 1e-3, adapter.decays, 0.01, (0.9, 0.95), 1e-8, 1.0)
    adapter.module.to_empty(device="cpu")
    adapter.module.tie_weights()
    if settings.sync == "step":
        return FlatEngine(adapter.module, optimizer, None, 1, 0, settings.precision)
    assert dist.group.WORLD is not None
    narrow_frozen(adapter.module, COMPUTE_TYPES[settings.precision])  # as where values are in files
    return ShardedEngine(adapter, optimizer, dist.group.WORLD, 0, torch.device("cpu"), settings.precision)


def run_step(
    adapter: LanguageModel, engine: Any, images: VisionInputs, inputs: Sequence[PackInputs],
    settings: MemorySettings, vision: VisionPlan,
) -> None:
    compute_type = COMPUTE_TYPES[settings.precision]
    phases = TracedPhases(adapter, images, vision.keeps, [own.received_from for own in inputs], torch.device("cpu"))
    phases.compute_type = compute_type
    if isinstance(engine, ShardedEngine):
        engine.before_encoding()
    received = phases.encode(SilentLink(1))
    for own, features in zip(inputs, received, strict=True):
        there = replace(own, pixels=torch.empty(own.pixels.shape, dtype=compute_type), features=features)
        loss = (engine.loss(there, SilentLink(1), own.num_images > 0) if isinstance(engine, ShardedEngine)
                else pack_loss(adapter, there, SilentLink(1)))
        loss.backward()
        del loss, there
    del received, features
    phases.backward(SilentLink(1))


def sample_of(name: str, text: int, grids: Sequence[Grid], adapter: LanguageModel) -> tuple[Sample, Payload]:
    """Text, then images, a text token behind each."""
    counts = [time * height * width // adapter.merge_area for time, height, width in grids]
    ids = np.array([5] * text + [token for count in counts for token in (*[adapter.vision_token_ids[0]] * count, 6)],
                   np.int32)
    pixels = [np.zeros((count * adapter.merge_area, adapter.patch_dim), np.float32) for count in counts]
    return (Sample(name, len(ids) - sum(counts), sum(counts), tuple(grids)),
            Payload(input_ids=ids, labels=np.where(ids == adapter.vision_token_ids[0], -100, ids),
                    grids=np.array(grids, np.int64).reshape(-1, 3), pixels=list(pixels)))
