"""What images encoded apart from the packs need: no more than the planner counts on, traced on fake tensors."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest

from dhp_ray.planner import CostModel
from dhp_ray.planner.cost.derived import with_encoder_apart
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.plan.types import Grid, VisionPlan
from tests.memory_trace import fake_world
from tests.published_configs import published_config, shape_of
from tests.step_trace import traced_step

COST = CostModel(0.0, 1.0, 0.0, 0.0, {2: 1e9})
CASES = [(name, sync, recomputes, frozen, keeps, shape)
         for sync in ("step", "micro_batch") for name in ("3B", "Qwen3-VL-2B", "InternVL3-1B")
         for recomputes in (False, True) for frozen in ((), ("vision",), ("language",))
         for keeps, shape in ((True, "many"), (False, "many"), (True, "text"))]


@pytest.mark.parametrize(("name", "sync", "recomputes", "frozen", "keeps", "shape"), [
    case if number in (0, 54) else pytest.param(*case, marks=pytest.mark.slow)
    for number, case in enumerate(CASES)], ids=str)
@pytest.mark.seconds
def test_a_step_fits_what_is_counted_on(
    name: str, sync: str, recomputes: bool, frozen: tuple[str, ...], keeps: bool, shape: str
) -> None:
    random_ = random.Random(f"{name}{recomputes}{frozen}{keeps}{shape}")
    settings = MemorySettings(sync=sync, world_size=1 if sync == "step" else 8, precision="bf16",
                              recomputes=recomputes, frozen=frozen)
    packs: list[list[tuple[int, list[Grid]]]] = []
    for number in range(3):
        images = [(1, 32, 32) if "Intern" in name else (1, 2 * random_.randint(4, 16), 2 * random_.randint(4, 16))
                  for _ in range(random_.randint(2, 5) if shape == "many" else number == 0)]
        packs.append([(random_.randint(10, 300) if shape == "many" else 3000, images)])
    patches = [time * height * width for pack in packs for _, grids in pack for time, height, width in grids]
    area = shape_of(name, 3).merge_area
    tokens = [sum(text + len(grids) + sum(t * h * w for t, h, w in grids) // area for text, grids in pack)
              for pack in packs]
    # as a plan of this cost would have it, on devices that hold packs of so many tokens
    memory = MemoryModel(shape_of(name, 3), replace(settings, largest_image=max(patches) // area))
    cost = with_encoder_apart(COST, memory, max(tokens))
    pass_patches, num_passes = 0 if keeps else max(patches), 0
    if sync == "micro_batch":
        pass_patches, num_passes = 0, 1 if keeps else len(patches)
    largest = sum(patches) if keeps else max(patches)
    held = 2 * cost.feature_bytes * sum(patches) / area
    pack = cost.pack_bytes + cost.language_bytes_per_token * max(tokens)
    kept = cost.encoder_bytes_per_patch * sum(patches) if keeps and "vision" not in frozen else 0.0
    counted = held + max(pack + kept, cost.encoder_bytes + cost.encoder_bytes_per_patch * largest)
    with fake_world(8) if sync == "micro_batch" else nullcontext():
        traced = traced_step(published_config(name, 3), packs, settings,
                             VisionPlan("world", keeps, pass_patches, num_passes))
    assert traced <= counted
    if not frozen:  # else most of it is what the loss needs where every token has a label
        load = memory.worst_load(max(tokens))._replace(patches=0)
        labels = max(sum(text for text, _ in pack) for pack in packs)  # images have none
        spared = sum(memory.memory(load).pack.values()) - sum(
            memory.memory(load._replace(valid_tokens=labels)).pack.values())
        assert traced >= 0.6 * (counted - spared), "memory that nobody uses"
