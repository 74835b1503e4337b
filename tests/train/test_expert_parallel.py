"""Experts that ranks share: any plan beside plain transformers, and as many ranks share them as can."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dhp_ray.config import CONF
from dhp_ray.model import expert_parallel
from dhp_ray.model.expert_parallel import ExpertParallel
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.runtime.worker.rank import Rank
from tests.engine_values import full_parameters
from tests.packs import EXPERT_PRESETS, plain_copy, plain_gradients, rough_model, save_model
from tests.ranks import run_processes as run_processes  # over both backends: conftest.py
from tests.ranks import run_ranks
from tests.train.random_plans import SAMPLES, World, check, random_plan
from tests.train.test_sharded_engine import make_step

TEXT, VISION, HYBRID = EXPERT_PRESETS
SHAPE = ModelShape.load(CONF / "model_shape" / "qwen3_30b_a3b.yaml")
MANY = 30
"""Experts, more than the presets have."""
WORLDS = [(2, World(2, "micro_batch", "pool", True, preset=VISION))]
OTHERS = [(2, World(4, "micro_batch", "pool", True, preset=VISION)),
          (3, World(3, "micro_batch", "pool", preset=TEXT)), (2, World(2, "micro_batch", "parent", preset=VISION)),
          (2, World(6, "micro_batch", "pool", preset=TEXT)),
          (3, World(6, "micro_batch", "parent", True, preset=VISION, encoder="world")),
          (3, World(3, "micro_batch", "pool", True, "vision", VISION)),
          (3, World(3, "micro_batch", "pool", False, "language", VISION)),
          (2, World(4, "micro_batch", "pool", True, preset=HYBRID)),
          (3, World(6, "micro_batch", "parent", preset=HYBRID))]


@pytest.mark.parametrize(("wanted", "num_ranks", "num_experts", "found"), [
    (1, 8, 128, 1), (8, 8, 128, 8), (8, 2, 128, 2), (2, 3, 128, 1), (7, 12, 6, 6), (5, 12, 6, 3), (4, 5, 30, 1),
    (5, 5, 30, 5), (99, 64, 128, 64), (8, 4, 0, 1)])
def test_as_many_ranks_share_experts_as_can(wanted: int, num_ranks: int, num_experts: int, found: int) -> None:
    layer = replace(SHAPE.language[0], experts=num_experts)
    assert replace(SHAPE, language=(layer,)).ranks_that_share(wanted, num_ranks) == found


@pytest.mark.parametrize(("size", "world"), [
    *WORLDS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)], ids=str)
def test_any_plan_beside_plain_transformers(reference: Callable[[str], Path], size: int, world: World) -> None:
    """Idle ranks and packs of any degree among those that share experts."""
    first = 40_000 + 10 * (*WORLDS, *OTHERS).index((size, world))
    seeds = range(first, first + 4)  # the first one is of text alone
    check(reference, world, [random_plan(seed, world) for seed in (seeds[1:2] if world is WORLDS[0][1] else seeds)],
          f"train.expert_parallel={size}", before=partial(in_force, size))


@pytest.mark.slow
def test_five_ranks_share_thirty_experts(tmp_path: Path) -> None:
    """Of most of them no token comes to some packs, or to any."""
    world = World(5, "micro_batch", "pool", True, preset=TEXT)
    adapter = rough_model(preset=TEXT, num_local_experts=MANY)
    plain = plain_copy(adapter)
    save_model(adapter, tmp_path / "model", dict(adapter.module.named_parameters()))
    torch.save({sample.id: plain_gradients(plain, [payload]) for sample, payload in SAMPLES[TEXT]},
               tmp_path / "gradients")
    check(lambda preset: tmp_path, world, [random_plan(seed, world) for seed in range(41_000, 41_004)],
          "train.expert_parallel=5", before=partial(in_force, 5))


def test_no_token_is_dropped_where_there_is_no_room(reference: Callable[[str], Path]) -> None:
    """The packs run again, and nothing of their first run is in loss or gradients."""
    world = World(3, "micro_batch", "pool", preset=VISION)
    check(reference, world, [random_plan(42_001, world)], "train.expert_parallel=3",
          before=cramp)


def test_packs_that_recompute_meet_those_that_do_not(reference: Callable[[str], Path]) -> None:
    """They share experts, whose layers must run equally often on all ranks."""
    world = World(3, "micro_batch", "pool", preset=TEXT)
    plan = random_plan(43_001, world)
    plan = replace(plan, groups=tuple(replace(group, recomputed=(0.0, 0.7, 1.0)[place % 3])
                                      for place, group in enumerate(plan.groups)))
    check(reference, world, [plan], "train.expert_parallel=3", before=partial(in_force, 3))


def generations(rank: int) -> None:
    """Three engines one after the other, the last one with fewer ranks that hold the same experts."""
    for sharing in (2, 2, 4):
        adapter = rough_model(preset=TEXT)
        wanted = {name: parameter.detach().clone() for name, parameter in adapter.module.named_parameters()}
        engine = make_step(adapter, rank, 4, sharing=sharing).engine
        parallel = engine.expert_parallel
        assert parallel is not None
        groups = [weakref.ref(group) for group in (parallel.group.holders, parallel.group.group)]
        found = full_parameters(engine)
        assert found.keys() == (wanted.keys() if rank == 0 else set())
        assert all(torch.equal(found[name], wanted[name]) for name in found)
        for piece in engine.pieces:
            assert torch.equal(engine.current.value[piece.shard],
                               wanted[piece.name].flatten()[piece.start:piece.stop]), piece
        engine.release()
        dist.barrier()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD and rank in dist.get_process_group_ranks(group):
                dist.destroy_process_group(group)
        del group, engine, parallel
        gc.collect()
        assert [group() for group in groups] == [None, None], "a group that is referred to keeps its sockets open"


def test_each_generation_has_its_own_ranks_that_share() -> None:
    run_ranks(generations, 4)


def in_force(size: int) -> None:
    """So many ranks must share experts in this process."""
    close = Rank.close

    def checked(rank: Any, broken: bool = False) -> None:
        assert rank.engine.expert_parallel.group.size == size
        close(rank, broken)

    Rank.close = checked  # type: ignore[method-assign]


def cramp() -> None:
    """Leave hardly any room for tokens in this process: the packs of every pass run again."""
    expert_parallel.CAPACITY, expert_parallel.CAPACITY_ROWS = 0.05, 0
    needs_more_room, answers = ExpertParallel.needs_more_room, [False]

    def noted(parallel: ExpertParallel, world: dist.ProcessGroup | None) -> bool:
        answers.append(needs_more_room(parallel, world))
        assert answers[-1] or answers[-2], "each pass runs twice at least"
        if not answers[-1]:
            parallel.capacity = 0.05
        return answers[-1]

    ExpertParallel.needs_more_room = noted  # type: ignore[method-assign]
    in_force(3)
