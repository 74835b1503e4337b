"""The losses that keep experts evenly used: their definition by transformers' routers, and any plan beside that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dhp_ray.train.collate import Payload
from dhp_ray.train.results import ExpertsUsed
from tests.packs import EXPERT_PRESETS, plain_copy, plain_loss, rough_model, save_model
from tests.ranks import run_processes as run_processes  # over both backends: conftest.py
from tests.train.random_plans import SAMPLES, World, check, random_plan

BALANCE, ROUTER_Z = 0.7, 0.02
WORLDS = [World(3, "micro_batch", "pool", preset=EXPERT_PRESETS[0]),
          World(3, "step", "pool", True, preset=EXPERT_PRESETS[1])]
OTHERS = [World(5, "step", "parent", preset=EXPERT_PRESETS[0]),
          World(5, "micro_batch", "pool", True, preset=EXPERT_PRESETS[1]),
          World(3, "micro_batch", "pool", True, preset=EXPERT_PRESETS[2])]


@contextmanager
def logits_of(module: Any) -> Iterator[list[Tensor]]:
    """What the routers of transformers give in the next forward pass, layer by layer."""
    found: list[Tensor] = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda gate, inputs, outputs: found.append(outputs[0]))
             for layer in module.get_decoder().layers]
    yield found
    for hook in hooks:
        hook.remove()


def gradients(module: PreTrainedModel, payload: Payload) -> tuple[float, dict[str, Tensor]]:
    """The sum of cross entropies of a sample, and the gradients of that with both losses for each label."""
    module.zero_grad()
    with logits_of(module) as layers:
        mean, count = plain_loss(module, payload)
    total = torch.zeros(())
    for logits in layers if count else ():
        probabilities, (num_tokens, num_experts) = logits.softmax(-1), logits.shape
        chosen = probabilities.topk(2, -1).indices
        used = torch.bincount(chosen.flatten(), minlength=num_experts)
        total = total + BALANCE * num_experts / (2 * num_tokens) * (used * probabilities.mean(0)).sum()
        total = total + ROUTER_Z * logits.logsumexp(-1).square().mean()
    if count:
        ((mean + total) * count).backward()
    return (mean.item() * count if count else 0.0), {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()}


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder_of(preset: str) -> Path:
        folder, adapter = tmp_path_factory.mktemp(preset), rough_model(preset=preset)
        plain = plain_copy(adapter)
        save_model(adapter, folder / "model", dict(adapter.module.named_parameters()))
        torch.save({sample.id: gradients(plain, payload) for sample, payload in SAMPLES[preset]}, folder / "gradients")
        return folder

    return folder_of


@pytest.mark.parametrize("world", [
    *WORLDS, *(pytest.param(world, marks=pytest.mark.slow) for world in OTHERS)], ids=str)
def test_any_plan_has_the_gradients_of_the_definition(balanced: Callable[[str], Path], world: World) -> None:
    """Sequences of a pack apart from each other; ranks without a token, and placeholders of idle ranks."""
    first = 20_000 + 10 * (*WORLDS, *OTHERS).index(world)
    seeds = range(first, first + 3)  # the first one is of text alone, and has idle ranks
    if world in WORLDS:
        seeds = seeds[:1] if world is WORLDS[0] else seeds[1:2]
    check(balanced, world, [random_plan(seed, world) for seed in seeds],
          f"train.balance_loss={BALANCE}", f"train.router_z_loss={ROUTER_Z}")


def test_how_evenly_experts_are_used() -> None:
    even = np.full((2, 8), 5)
    assert ExpertsUsed.of(even) == pytest.approx((1.0, 1.0))
    one = np.eye(8, dtype=int)[:1] * 9
    assert ExpertsUsed.of(one) == pytest.approx((0.0, 8.0))
    assert ExpertsUsed.of(np.concatenate((even, one))) == pytest.approx((2 / 3, 8.0))
    assert ExpertsUsed.of(np.zeros((2, 8), int)) is None
