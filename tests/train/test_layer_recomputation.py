"""Under any plan in every mode losses and gradients are the same bits, whatever share of a pack's layers is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from dhp_ray.config import Config
from dhp_ray.planner.plan.types import Plan
from tests.packs import PRESETS
from tests.ranks import run_processes
from tests.train.both_ways import both_ways, config_of, member_of
from tests.train.random_plans import WATCHDOG_S, World, random_plan

WORLDS = [(World(3, "step", "pool"), 0.0), (World(3, "micro_batch", "pool"), 0.0),
          (World(5, "micro_batch", "parent", False, "language"), 0.0),
          (World(3, "step", "parent"), 0.0), (World(3, "step", "pool", False, "vision"), 0.2),
          (World(3, "micro_batch", "pool", False, "vision"), 0.2),
          (World(3, "step", "pool", False, encoder="world", splits=True), 0.0),
          (World(3, "micro_batch", "pool", False, encoder="world", splits=True), 0.0)]
WORLDS += [(World(3, sync, "pool", False, "", preset), 0.0) for preset in PRESETS if preset != "tiny"
           for sync in ("step", "micro_batch")]
QUICK = [WORLDS[0], WORLDS[1]]


@pytest.mark.parametrize(("world", "dropout"), [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in WORLDS], ids=str)
def test_random_plans_give_the_same_bits_at_any_share(tmp_path: Path, world: World, dropout: float) -> None:
    """In all modes, at any degrees and shares, of every family, with adapters, dropout and frozen parts. In
    `micro_batch` ranks that run a layer again gather and reduce beside ranks that do not.
    """
    seeds = [51] if (world, dropout) in QUICK else range(50, 53)  # the first one is of text alone
    config, plans = config_of(tmp_path, world, dropout), [random_plan(seed, world) for seed in seeds]
    found = run_processes(recomputed, world.num_ranks, world, config, plans, timeout_s=WATCHDOG_S * 4)
    assert sum(count for of_rank in found for count in of_rank) > 0


def recomputed(rank: int, port: int, world: World, config: Config, plans: list[Plan]) -> list[int]:
    """How often layers of the language model ran again in each plan."""
    with member_of(world, config, rank, port) as member:
        attention, counts = type(member.adapter.language.layers[-1].self_attn), dict[str, list[int]]()

        @contextmanager
        def around(kind: str) -> Iterator[None]:
            with mock.patch.object(attention, "forward", autospec=True, side_effect=attention.forward) as forward:
                yield
            counts.setdefault(kind, []).append(forward.call_count)

        for _ in both_ways(member, world, rank, plans, "recomputed", around):
            assert counts["evaluation"][-1] == counts["evaluation"][-2], "without gradients nothing is recomputed"
        return [after - before for before, after in zip(counts["step"][::2], counts["step"][1::2])]
