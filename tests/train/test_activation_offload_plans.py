"""Under any plan in every mode losses and gradients are the same bits, with activations in host memory and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dhp_ray.config import Config
from dhp_ray.planner.plan.types import Plan
from tests.packs import PRESETS
from tests.ranks import run_processes
from tests.train.both_ways import both_ways, config_of, member_of
from tests.train.random_plans import WATCHDOG_S, World, random_plan

WORLDS = [(World(3, "step", "pool"), 0.0), (World(5, "micro_batch", "pool", True), 0.0),
          (World(3, "micro_batch", "parent"), 0.0), (World(3, "step", "parent", True), 0.0),
          (World(3, "step", "pool", True, "language"), 0.0),
          (World(3, "step", "pool", False, "vision"), 0.2), (World(3, "micro_batch", "pool", True, "vision"), 0.2),
          (World(3, "step", "pool", encoder="world"), 0.0),
          (World(3, "micro_batch", "pool", True, encoder="world", splits=True), 0.0),
          (World(3, "step", "pool", encoder="world", splits=True), 0.0)]
WORLDS += [(World(3, sync, "pool", recomputes, "", preset), 0.0) for preset in PRESETS if preset != "tiny"
           for sync, recomputes in (("step", False), ("micro_batch", True))]
QUICK = [WORLDS[8]]


@pytest.mark.parametrize(("world", "dropout"), [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in WORLDS], ids=str)
def test_random_plans_give_the_same_bits_with_and_without(tmp_path: Path, world: World, dropout: float) -> None:
    """In all modes, at any degrees and shares, of every family, with adapters, dropout and frozen parts."""
    seeds = [41] if (world, dropout) in QUICK else range(40, 43)  # the first one is of text alone
    config, plans = config_of(tmp_path, world, dropout), [random_plan(seed, world) for seed in seeds]
    found = run_processes(moved, world.num_ranks, world, config, plans, timeout_s=WATCHDOG_S * 4)
    assert sum(num_bytes for of_rank in found for num_bytes in of_rank) > 0


def moved(rank: int, port: int, world: World, config: Config, plans: list[Plan]) -> list[int]:
    """Bytes that each plan moved."""
    with member_of(world, config, rank, port) as member:
        @contextmanager
        def around(kind: str) -> Iterator[None]:
            yield
            assert kind == "step" or member.stepper.offload.moved_bytes == 0, "without gradients nothing is kept"

        return [member.stepper.offload.buffer.num_bytes
                for _ in both_ways(member, world, rank, plans, "offload", around)]
