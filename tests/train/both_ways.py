"""Runs random plans as they are, and with layers of each pack moved or recomputed, and compares the bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dhp_ray.comm.device import CPU
from dhp_ray.config import Config, load
from dhp_ray.planner.plan.types import Plan
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.train.step_inputs import collated
from tests.packs import own_payloads, rough_model, save_model
from tests.train.networks import whole
from tests.train.random_plans import SAMPLES, STEP, World
from tests.train.test_lora_plans import with_rough_adapters


def config_of(folder: Path, world: World, dropout: float) -> Config:
    """Of a run in this world, with adapters if there is dropout. Its model is saved in `folder`."""
    model = rough_model(preset=world.preset)
    save_model(model, folder, {name: value.detach() for name, value in model.module.named_parameters()})
    adapters = ["train.lora.rank=4", "train.lora.alpha=8", f"train.lora.dropout={dropout}"] if dropout else []
    return load([f"model.path={folder}", "model.preset=", f"planner.sync={world.sync}",
                 f"comm.transport={world.transport}", f"train.freeze=[{world.freeze}]",
                 f"train.activation_checkpointing={str(world.recomputes).lower()}",
                 "comm.timeout_s=60", "run.dir=unused", "train.adam_beta1=0",
                 "train.clip_norm=0", *adapters])


@contextmanager
def member_of(world: World, config: Config, rank: int, port: int) -> Iterator[Rank]:
    with with_rough_adapters():
        member = Rank(config, Membership(rank, world.num_ranks, 1, "127.0.0.1", port), CPU)
    yield member
    member.close()


def both_ways(
    member: Rank, world: World, rank: int, plans: list[Plan], share: str,
    around: Callable[[str], AbstractContextManager[object]],
) -> Iterator[None]:
    """After each plan that has been run in both ways: `share` is the field of a pack that is drawn at random, 0 and 1
    among them. `around("evaluation")` is entered for each evaluation, `around("step")` for each step.
    """
    payloads = {sample.id: payload for sample, payload in SAMPLES[world.preset]}
    for seed, plan in enumerate(plans):
        shares, found = np.random.default_rng(seed).choice([0.0, 0.3, 0.5, 1.0], len(plan.groups)), []
        drawn = tuple(replace(group, **{share: float(value)}) for group, value in zip(plan.groups, shares))
        for groups in (plan.groups, drawn):
            rank_plan = replace(plan, groups=groups).rank_plan(STEP, rank)
            own = {name: payload for pack in (*rank_plan.packs, *rank_plan.encoded)
                   for name, payload in own_payloads(pack, payloads, rank).items()}
            inputs = collated(rank_plan, own, member.adapter)
            with around("evaluation"):
                evaluated = member.stepper.evaluate(inputs)
            with around("step"):
                result = member.stepper.run(inputs, 0.0)
            found.append((evaluated, result.loss_sum, result.gradient_norm, whole(member.engine, "exp_avg")))
        (*numbers, gradients), (*others, changed) = found
        assert numbers == others
        assert gradients.keys() == changed.keys()
        assert all(torch.equal(gradients[name], changed[name]) for name in gradients)
        yield
