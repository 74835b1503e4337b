"""Under any plan in every mode losses and gradients are the same bits, whatever share of a pack's layers is recomputed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from dhp_ray.comm.device import CPU
from dhp_ray.config import Config, load
from dhp_ray.planner.plan import Plan
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.step_inputs import collated
from tests.packs import PATCH_DIMS, own_payloads, rough_model
from tests.ranks import run_processes
from tests.train.networks import whole
from tests.train.random_plans import SAMPLES, STEP, WATCHDOG_S, World, random_plan
from tests.train.test_activation_offload_plans import ALONE
from tests.train.test_lora_plans import with_rough_adapters

WORLDS = [(World(3, "step", "pool"), 0.0), (World(3, "micro_batch", "pool"), 0.0),
          (World(5, "micro_batch", "parent", False, "language"), 0.0),
          (World(3, "step", "parent", False, "", "node"), 0.0),
          (World(3, "step", "pool", False, "vision", "node"), 0.2),
          (World(3, "micro_batch", "pool", False, "vision"), 0.2),
          (World(3, "step", "pool", False, encoder="world", splits=True), 0.0),
          (World(3, "micro_batch", "pool", False, encoder="world", splits=True), 0.0)]
WORLDS += [(World(3, sync, "pool", False, "", "whole", preset), 0.0) for preset in PATCH_DIMS if preset != "tiny"
           for sync in ("step", "micro_batch")]
QUICK = [WORLDS[0], WORLDS[1]]


@pytest.mark.parametrize(("world", "dropout"), [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in WORLDS], ids=str)
def test_random_plans_give_the_same_bits_at_any_share(tmp_path: Path, world: World, dropout: float) -> None:
    """In all modes, at any degrees and shares, of every family, with adapters, dropout and frozen parts. In
    `micro_batch` ranks that run a layer again gather and reduce beside ranks that do not.
    """
    model = rough_model(preset=world.preset)
    model.save(tmp_path, {name: value.detach() for name, value in model.module.named_parameters()})
    adapters = ["train.lora.rank=4", "train.lora.alpha=8", f"train.lora.dropout={dropout}"] if dropout else []
    config = load([f"model.path={tmp_path}", "model.preset=", f"planner.sync={world.sync}",
                   f"comm.transport={world.transport}", f"train.freeze=[{world.freeze}]",
                   f"train.sharding={world.sharding}", "comm.timeout_s=60", "run.dir=unused", "train.adam_beta1=0",
                   "train.clip_norm=0", *adapters])
    plans = [random_plan(seed, world) for seed in range(50, 53)]
    found = run_processes(run_both_ways, world.num_ranks, world, config, plans, timeout_s=WATCHDOG_S * 4)
    assert sum(again for of_rank in found for again in of_rank) > 0


def run_both_ways(rank: int, port: int, world: World, config: Config, plans: list[Plan]) -> list[int]:
    """Layers that run again in each plan, with its packs' shares drawn at random, 0 and 1 among them."""
    with with_rough_adapters():
        member = Rank(config, Membership(rank, world.num_ranks, 1, "127.0.0.1", port, nodes=ALONE[:world.num_ranks]),
                      CPU)
    payloads, counts = {sample.id: payload for sample, payload in SAMPLES[world.preset]}, []
    for seed, plan in enumerate(plans):
        shares = np.random.default_rng(seed).choice([0.0, 0.3, 0.5, 1.0], len(plan.groups))
        found, runs = [], []
        for changed in (plan, replace(plan, groups=tuple(replace(group, recomputed=float(share))
                                                         for group, share in zip(plan.groups, shares)))):
            rank_plan = changed.rank_plan(STEP, rank)
            own = {name: payload for pack in (*rank_plan.packs, *rank_plan.encoded)
                   for name, payload in own_payloads(pack, payloads, rank).items()}
            inputs = collated(rank_plan, own, member.adapter)
            with counted_layers(member) as evaluated_layers:
                evaluated = member.stepper.evaluate(inputs)
            with counted_layers(member) as layers:
                result = member.stepper.run(inputs, 0.0)
            runs.append((evaluated_layers.call_count, layers.call_count))
            found.append((evaluated, result.loss_sum, result.gradient_norm, whole(member.engine, "exp_avg")))
        (*numbers, gradients), (*others, recomputed) = found
        assert numbers == others
        assert gradients.keys() == recomputed.keys()
        assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)
        assert runs[0][0] == runs[1][0], "without gradients nothing is recomputed"
        counts.append(runs[1][1] - runs[0][1])
    member.close()
    return counts


def counted_layers(member: Rank) -> mock._patch[mock.MagicMock]:
    """Counts the forward passes of the language model's attention layers."""
    attention = type(member.adapter.stack("language").layers[0].self_attn)
    return mock.patch.object(attention, "forward", autospec=True, side_effect=attention.forward)
