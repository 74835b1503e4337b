"""Any plan that is valid ends, with the right gradients: random groups, ring orders, encoders and samples, each under a
watchdog.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.cases import SYNCS, TRANSPORTS
from dhp_ray.comm import device
from dhp_ray.planner.plan.cluster import ClusterSpec
from dhp_ray.planner.plan.types import Pack, Plan
from tests.packs import PRESETS, TEXT_PRESETS
from tests.ranks import run_processes as run_processes  # over both backends: conftest.py
from tests.train.random_plans import SAMPLES, World, check, random_plan

WORLDS = [World(*values) for values in product((3, 5), SYNCS, TRANSPORTS, (False, True, "selective"),
                                           ("", "vision", "language"))]
FEW = [World(num_ranks, sync, transport, recomputes, freeze) for sync in SYNCS
       for num_ranks, transport, recomputes, freeze in (
    (3, "pool", True, ""), (5, "parent", "selective", "vision"), (3, "parent", True, "language"),
    (5, "pool", False, ""))]
QUICK = [FEW[2], World(3, "micro_batch", "parent", "selective", "vision")]
FAMILIES = [World(5, sync, "pool", recomputes, "" if preset in TEXT_PRESETS else freeze, preset)
            for preset in PRESETS if preset != "tiny"
            for sync, recomputes, freeze in (("step", False, ""), ("step", "selective", "language"),
                                             ("micro_batch", True, ""))]
QUICK_FAMILIES = [replace(world, num_ranks=3) for world in (FAMILIES[2], FAMILIES[4])]
TEXT = [World(5, sync, "pool", preset=preset) for sync, preset in product(SYNCS, TEXT_PRESETS)]
QUICK_TEXT = [replace(TEXT[2], num_ranks=3)]


@pytest.mark.parametrize("world", [
    *QUICK, *(pytest.param(world, marks=pytest.mark.slow) for world in FEW if world not in QUICK)], ids=str)
def test_random_plans(reference: Callable[[str], Path], world: World) -> None:
    """The first of those below, of which the very first is of text alone."""
    few = seeds(world, 2)
    check(reference, world, [random_plan(seed, world) for seed in (few[1:] if world in QUICK else few)])


@pytest.mark.parametrize("world", [  # a mode of each family in make test; others are in test_random_plans_apart.py
    *QUICK_FAMILIES, *(pytest.param(world, marks=pytest.mark.slow) for world in FAMILIES)], ids=str)
def test_random_plans_of_other_families(reference: Callable[[str], Path], world: World) -> None:
    first = 10_000 + 100 * (*FAMILIES, *QUICK_FAMILIES).index(world)
    seeds = [first + 1] if world in QUICK_FAMILIES else range(first, first + 3)  # the first one is of text alone
    check(reference, world, [random_plan(seed, world) for seed in seeds])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_two_hundred_random_plans_of_each_mode(reference: Callable[[str], Path], world: World) -> None:
    alike = [other for other in WORLDS if other.sync == world.sync]
    check(reference, world, [random_plan(seed, world) for seed in seeds(world, math.ceil(200 / len(alike)))])


@pytest.mark.parametrize(("num_ranks", "sync", "first"), [
    (3, SYNCS[0], 1006), *(pytest.param(5, sync, 1002, marks=pytest.mark.slow) for sync in SYNCS)])
def test_more_groups_than_the_pool_holds(
    reference: Callable[[str], Path], num_ranks: int, sync: str, first: int
) -> None:
    world = World(num_ranks, sync, "pool")
    plans = [random_plan(seed, world) for seed in range(first, first + 3)]
    assert max(len(plan.process_groups()) for plan in plans) > 2
    pools = check(reference, world, plans, before=keep_two_groups)
    assert pools[0]["evictions"] > 0
    assert pools[0]["overflows"] > 0


def keep_two_groups() -> None:
    device.POOL_GROUPS = 2


@pytest.mark.parametrize("transport", [TRANSPORTS[0], pytest.param(TRANSPORTS[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("sync", [pytest.param(SYNCS[0], marks=pytest.mark.slow), SYNCS[1]])
@pytest.mark.parametrize(("num_ranks", "degrees"), [
    (3, (2, 3)), *(pytest.param(5, degrees, marks=pytest.mark.slow) for degrees in ((3, 5), (1, 2, 4)))])
def test_a_video_in_packs_of_every_degree(
    reference: Callable[[str], Path], sync: str, transport: str, num_ranks: int, degrees: tuple[int, ...]
) -> None:
    """Its pieces in time are encoded by different ranks; the ranks beside its pack have another video, text, or
    nothing.
    """
    ranks = (*range(1, num_ranks), 0)
    check(reference, World(num_ranks, sync, transport), [plan_of([
        (ranks[:degree], ("film", "text"), tuple(piece % degree for piece in range(4)), 0),
        *([(ranks[degree:], ("reel",), (0,), 0)] if degree < num_ranks else []),
        ((0,), ("image", "word"), (0,), 1)], sync, num_ranks) for degree in degrees])


@pytest.mark.parametrize("world", [
    *QUICK_TEXT, *(pytest.param(world, marks=pytest.mark.slow) for world in TEXT)], ids=str)
def test_text_in_packs_of_every_degree(reference: Callable[[str], Path], world: World) -> None:
    """Of a model without an encoder; the last rank has nothing in the first plans."""
    ranks = (*range(1, world.num_ranks), 0)
    plans = [plan_of([(ranks[:degree], ("long", "token", "text"), (), 0),
                      *([(ranks[degree:][:1], ("short",), (), 0)] if degree < world.num_ranks else []),
                      ((0,), ("word",), (), 1)], world.sync, world.num_ranks, world.preset)
             for degree in (1, 2, 3, 5) if degree <= world.num_ranks]
    check(reference, world, plans, tolerance=1e-5)


def plan_of(
    groups: Sequence[tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...], int]], sync: str, num_ranks: int,
    preset: str = "tiny"
) -> Plan:
    """A plan of groups: ranks, names of samples, their images' encoders by place in these ranks, micro-batch."""
    named = {sample.id: sample for sample, _ in SAMPLES[preset]}
    samples = [named[name] for _, names, _, _ in groups for name in names]
    places = {sample.id: place for place, sample in enumerate(samples)}
    planned = tuple(Pack(ranks, tuple(places[name] for name in names), 1.0, 0.0,
                              micro_batch if sync == "micro_batch" else 0, tuple(ranks[member] for member in encoders))
                    for ranks, names, encoders, micro_batch in groups)
    plan = Plan("listed", sync, ClusterSpec(num_ranks, num_ranks, 10_000), tuple(samples), planned, 1.0, 1.0)
    plan.validate()
    return plan


def seeds(world: World, count: int) -> range:
    first = 100 * WORLDS.index(world)
    return range(first, first + count)
