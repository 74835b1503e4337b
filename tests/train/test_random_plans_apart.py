"""Any plan whose images any rank encodes, apart from the packs, ends with the right gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan
from tests.packs import PATCH_DIMS, with_images_apart, with_splits
from tests.ranks import run_processes as run_processes  # over both backends: conftest.py
from tests.train.random_plans import SAMPLES, TOLERANCE, World, check, random_plan

APART = [World(num_ranks, sync, transport, recomputes, freeze, preset, "world")
         for num_ranks, sync, transport, recomputes, freeze, preset in (
    (5, "step", "pool", False, "", "tiny"), (3, "step", "parent", True, "", "tiny"),
    (2, "step", "pool", False, "vision", "tiny"), (3, "step", "pool", False, "language", "tiny"),
    (1, "step", "pool", False, "", "tiny"), (5, "step", "parent", True, "vision", "tiny"),
    (5, "step", "pool", False, "", "tiny_qwen3_vl"), (3, "step", "parent", True, "", "tiny_qwen3_vl"),
    (5, "step", "pool", True, "", "tiny_internvl"), (3, "step", "pool", False, "language", "tiny_internvl"),
    (3, "micro_batch", "pool", False, "", "tiny"), (5, "micro_batch", "parent", True, "", "tiny"),
    (2, "micro_batch", "pool", True, "vision", "tiny"),
    (3, "micro_batch", "parent", False, "language", "tiny"),
    (1, "micro_batch", "pool", False, "", "tiny"),
    (5, "micro_batch", "pool", True, "language", "tiny"),
    (5, "micro_batch", "pool", False, "vision", "tiny"),
    (3, "micro_batch", "pool", True, "", "tiny_qwen3_vl"),
    (5, "micro_batch", "parent", False, "", "tiny_internvl"),
    (3, "micro_batch", "pool", True, "", "tiny_qwen3_5"),
    (3, "step", "parent", False, "", "tiny_qwen3_5_moe"),
    (3, "micro_batch", "pool", True, "", "tiny_glm4v"))]


SPLIT = [World(num_ranks, sync, transport, recomputes, freeze, preset, "world", True)
         for num_ranks, sync, transport, recomputes, freeze, preset in (
    (3, "step", "pool", True, "", "tiny"), (5, "step", "parent", False, "", "tiny"),
    (2, "step", "pool", False, "language", "tiny"), (5, "step", "pool", False, "vision", "tiny"),
    (5, "step", "pool", False, "", "tiny_qwen3_vl"), (3, "step", "parent", True, "", "tiny_internvl"),
    (3, "micro_batch", "pool", False, "", "tiny"), (5, "micro_batch", "parent", True, "", "tiny"),
    (2, "micro_batch", "pool", True, "vision", "tiny"),
    (5, "micro_batch", "pool", False, "language", "tiny"),
    (3, "micro_batch", "parent", True, "", "tiny_qwen3_vl"),
    (5, "micro_batch", "pool", False, "", "tiny_internvl"),
    (5, "step", "pool", False, "", "tiny_glm4v"))]


QUICK = [APART[7], SPLIT[5], SPLIT[6]]


def seeds(world: World, first: int) -> range:
    """Two have images kept and not, six every number of passes; the first of all is of text alone."""
    return range(first + 2, first + 4) if world in QUICK else range(first, first + 6)


@pytest.mark.parametrize("world", [
    world if world in QUICK else pytest.param(world, marks=pytest.mark.slow) for world in APART], ids=str)
def test_random_plans_whose_images_any_rank_encodes(reference: Callable[[str], Path], world: World) -> None:
    plans = [random_plan(seed, world) for seed in seeds(world, 20_000 + 100 * APART.index(world))]
    assert {plan.vision.keeps for plan in plans} == {True, False}
    # transformers' own fp32 gradients of gated delta nets are off by 1e-5
    check(reference, world, plans, tolerance=3e-5 if "qwen3_5" in world.preset else TOLERANCE)


@pytest.mark.parametrize("world", [
    world if world in QUICK else pytest.param(world, marks=pytest.mark.slow) for world in SPLIT], ids=str)
def test_random_plans_whose_images_several_ranks_encode(reference: Callable[[str], Path], world: World) -> None:
    plans = [random_plan(seed, world) for seed in seeds(world, 30_000 + 100 * SPLIT.index(world))]
    assert any(group.splits for plan in plans for group in plan.groups)
    check(reference, world, plans)


def plan_of_one_image(world: World, ranks: tuple[int, ...], keeps: bool) -> Plan:
    """A sample whose image of three steps in time these ranks encode, run by rank 0, beside a text on the others."""
    samples = tuple(sample for wanted in ("reel", "text") for sample, _ in SAMPLES[world.preset] if sample.id == wanted)
    groups = (Pack((0,), (0,), 1.0, encoders=(0,) * len(samples[0].vision_grids)),
              Pack((2, 1), (1,), 1.0))
    plan = with_images_apart(Plan("one image", world.sync, ClusterSpec(3, 3, 10_000), samples, groups, 1.0, 1.0), keeps)
    plan = with_splits(plan, {0: ranks})
    plan.validate()
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize("preset", PATCH_DIMS)
def test_one_image_on_two_and_three_ranks_is_that_of_one(
    reference: Callable[[str], Path], preset: str, sync: str
) -> None:
    world = World(3, sync, "pool", preset=preset, encoder="world", splits=True)
    plans = [plan_of_one_image(world, ranks, keeps) for ranks in ((2, 1), (1, 2, 0), (0, 1), (2, 0, 1))
             for keeps in (True, False)]
    check(reference, world, plans, tolerance=1e-5)
