"""The room that packs have for a large image, against passes that are traced on fake tensors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from tests.memory_trace import fake_world, traced
from tests.published_configs import published_config, shape_of


@pytest.mark.parametrize(("mode", "recomputed"), [
    ("step", 0.0), pytest.param("micro_batch", 1.0, marks=pytest.mark.slow)])
@pytest.mark.seconds
def test_an_image_may_be_larger_than_what_a_rank_holds_of_its_pack(mode: str, recomputed: float) -> None:
    """One of four ranks, with 111 tokens each, encodes the image of 400 tokens."""
    settings = MemorySettings(sync=mode, world_size=8 if mode == "micro_batch" else 1, precision="bf16",
                              recomputes=False)
    with fake_world(8) if mode == "micro_batch" else nullcontext():
        found = traced(published_config("3B", 2), [(40, [(1, 40, 40)])], settings, 4, None, 0.0, recomputed)
    assert (found.load.tokens, found.load.patches) == (111, 1600)
    memory = MemoryModel(shape_of("3B", 2), replace(settings, world_size=4, largest_image=400, image_limit=400))
    counted = sum(memory.memory(memory.worst_load(111, recomputed=recomputed)).pack.values())
    assert found.pack_bytes <= counted <= 1.1 * found.pack_bytes
