"""Peak memory of a whole step whose images are encoded apart from its packs, on fake tensors (`memory_trace`)."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.planner.memory_terms import MemorySettings
from dhp_ray.planner.plan import Grid, RankPack, RankPlan, Sample, VisionPlan
from dhp_ray.train.collate import collate
from dhp_ray.train.encoder_phases import EncoderPhases
from dhp_ray.train.engine import COMPUTE_TYPES
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.pack import pack_loss
from dhp_ray.train.payload import Payload
from dhp_ray.train.state.optimizer import OptimizerSettings
from dhp_ray.train.vision_inputs import EncoderPass, vision_inputs
from tests.memory_trace import SilentLink, memory_trace
from tests.published_configs import model_without_memory


class TracedPhases(EncoderPhases):
    """Copies a pass's pixels to the device, as where that is not the CPU."""

    def _encode(self, images: EncoderPass) -> Tensor:
        return self._adapter.encode(torch.empty(images.pixels.shape, dtype=self._engine.compute_type), images.encoder)


def traced_step(
    config: PreTrainedConfig, packs: Sequence[Sequence[tuple[int, Sequence[Grid]]]], settings: MemorySettings,
    vision: VisionPlan,
) -> int:
    """The most bytes that a step adds to what one rank holds between steps, which encodes the images of all of its
    packs; these are given as samples, of (text tokens, grids of images)."""
    adapter = model_without_memory(config)
    adapter.freeze(settings.frozen)
    if settings.recomputes:
        adapter.set_activation_checkpointing()
    rank_packs, payloads = [], {}
    for index, samples in enumerate(packs):
        made = [sample_of(f"{index}.{place}", text, grids, adapter) for place, (text, grids) in enumerate(samples)]
        payloads |= {sample.id: payload for sample, payload in made}
        count = sum(len(grids) for _, grids in samples)
        rank_packs.append(RankPack(index, (0,), tuple(sample for sample, _ in made), (0,) * count, 1.0))
    plan = RankPlan(1, 0, (), tuple(rank_packs), (), "", vision, tuple(pack for pack in rank_packs if pack.encoders))
    images = vision_inputs(plan, payloads.__getitem__, adapter)
    inputs = [collate(pack, payloads, 0, adapter, apart=True) for pack in rank_packs]
    optimizer = OptimizerSettings(lambda name: 1e-3, adapter.decays, 0.01, (0.9, 0.95), 1e-8, 1.0)
    with memory_trace() as trace:
        adapter.module.to_empty(device="cpu")
        adapter.module.tie_weights()
        engine: Any = FlatEngine(adapter.module, optimizer, None, 1, 0, settings.precision, settings.bucket_bytes)
        engine.zero_gradients()
        gc.collect()
        before_bytes = trace.live_bytes
        trace.begin()
        phases = TracedPhases(adapter, engine, images, vision.keeps, [own.received_from for own in inputs],
                              torch.device("cpu"))
        received = phases.encode(SilentLink(1))
        for own, features in zip(inputs, received, strict=True):
            pixels = torch.empty(own.pixels.shape, dtype=COMPUTE_TYPES[settings.precision])
            loss = pack_loss(adapter, replace(own, pixels=pixels), SilentLink(1), features=features)
            loss.backward()
            del loss
        del received, features
        phases.backward(SilentLink(1))
        step_bytes = trace.peak_bytes - before_bytes
        engine.release()
    return step_bytes


def sample_of(name: str, text: int, grids: Sequence[Grid], adapter: ModelAdapter) -> tuple[Sample, Payload]:
    """Text, then images, a text token behind each."""
    counts = [time * height * width // adapter.merge_area for time, height, width in grids]
    ids = np.array([5] * text + [token for count in counts for token in (*[adapter.image_token_id] * count, 6)],
                   np.int32)
    pixels = [np.zeros((count * adapter.merge_area, adapter.patch_dim), np.float32) for count in counts]
    return (Sample(name, len(ids) - sum(counts), sum(counts), tuple(grids)),
            Payload(input_ids=ids, labels=np.where(ids == adapter.image_token_id, -100, ids),
                    grids=np.array(grids, np.int64).reshape(-1, 3), pixels=list(pixels)))
