"""Adapters under any plan in every mode: losses and gradients are those of PEFT on plain transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from dhp_ray.config import load
from dhp_ray.model.lora import LoraSettings, first_values, kept, layer_key, token_keys
from tests.model.test_lora import ALL, OF_EXPERTS, own_gradients, save, with_adapters
from tests.packs import (
    EXPERT_PRESETS,
    PATCH_DIMS,
    PRESETS,
    TEXT_PRESETS,
    plain_copy,
    plain_loss,
    rough_model,
    save_model,
)
from tests.ranks import run_processes
from tests.train.random_plans import SAMPLES, STEP, TOLERANCE, WATCHDOG_S, World, random_plan, run_plans
from tests.train.test_expert_parallel import in_force

WORLDS = [World(3, "step", "pool"), World(5, "micro_batch", "pool", True), World(5, "step", "parent", True, "vision"),
          World(3, "micro_batch", "parent", False, "vision"), World(5, "step", "pool", True),
          World(3, "step", "pool", False, "language"),
          World(3, "micro_batch", "pool", False, "language")]
WORLDS += [World(3, sync, "pool", True, "", preset) for preset in PRESETS if preset != "tiny"
           for sync in ("step", "micro_batch")]
WORLDS += [World(num_ranks, sync, "pool", True, freeze, preset, "world") for num_ranks, sync, freeze, preset in (
    (3, "step", "", "tiny"), (3, "micro_batch", "", "tiny_internvl"), (5, "step", "", "tiny"),
    (3, "micro_batch", "language", "tiny"), (3, "step", "vision", "tiny_qwen3_vl"))]
WORLDS += [World(num_ranks, sync, "parent", recomputes, "", preset, "world", True)
           for num_ranks, sync, recomputes, preset in (
    (3, "step", True, "tiny_qwen3_vl"), (5, "micro_batch", False, "tiny_qwen3_vl"), (5, "step", False, "tiny"))]
RATE = 0.2
DROPPING = [World(3, "step", "pool", True, "vision", preset) for preset in PATCH_DIMS]
DROPPING += [World(3, "micro_batch", "pool", preset=preset) for preset in TEXT_PRESETS]
DROPPING += [World(5, "step", "pool", False, "vision"),
             World(5, "micro_batch", "pool", True, "vision"), World(3, "micro_batch", "pool", False, "vision")]
CASES = [*((world, 0.0) for world in WORLDS), *((world, RATE) for world in DROPPING)]
FEW = [(WORLDS[0], 0.0), (DROPPING[0], RATE)]
TEXT, VISION, HYBRID = EXPERT_PRESETS
SHARED = [(size, World(num_ranks, sync, transport, recomputes, freeze, preset))
          for size, num_ranks, sync, transport, recomputes, freeze, preset in (
    (2, 2, "micro_batch", "pool", True, "", VISION), (1, 1, "micro_batch", "pool", False, "", TEXT),
    (1, 1, "step", "pool", False, "", HYBRID), (2, 2, "micro_batch", "pool", False, "", TEXT),
    (2, 4, "micro_batch", "pool", True, "", VISION), (2, 4, "micro_batch", "parent", False, "", TEXT),
    (2, 4, "micro_batch", "pool", True, "", HYBRID), (1, 4, "step", "pool", True, "", VISION),
    (1, 3, "micro_batch", "pool", True, "", TEXT), (3, 3, "micro_batch", "parent", False, "vision", VISION))]
"""Ranks that share adapted experts, and the world."""


def rough_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """First values with which both matrices of an adapter have gradients."""
    return first_values(name.replace("lora_B", "lora_A"), shape, 7 if "lora_B" in name else seed)


def with_rough_adapters() -> Any:
    """A context in which the adapters of a model begin with such values."""
    return patch("dhp_ray.model.language_model.first_values", rough_values)


def run_adapted(*arguments: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    with with_rough_adapters():
        return run_plans(*arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a preset's model; made once it is asked for."""
    @cache
    def folder_of(preset: str) -> Path:
        folder, base = tmp_path_factory.mktemp(preset), rough_model(preset=preset)
        save_model(base, folder, {name: value.detach() for name, value in base.module.named_parameters()})
        return folder

    return folder_of


class Dropout(torch.nn.Module):
    """In the place of PEFT's dropout before the adapter of the layer `name`: drops the same of a sample's values."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.keys = layer_key(name), torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * kept(self.keys, self.layer, x.shape[-1], RATE).view(x.shape) / (1 - RATE)


def replace_dropout(plain: PeftModel) -> list[Dropout]:
    model = plain.base_model.model
    names = [name for name, module in model.named_modules() if hasattr(module, "lora_dropout")]
    for name in names:
        model.get_submodule(name).lora_dropout["default"] = Dropout(name)
    return [module for module in model.modules() if isinstance(module, Dropout)]


@pytest.mark.parametrize(("world", "rate"), [
    pytest.param(*case, marks=[] if case in FEW else pytest.mark.slow) for case in CASES], ids=str)
def test_random_plans_of_adapters(
    saved: Callable[[str], Path], tmp_path: Path, world: World, rate: float
) -> None:
    seeds = [1] if (world, rate) in FEW else range(3)  # the first one is of text alone
    check(saved(world.preset), tmp_path, world, replace(ALL, dropout=rate), seeds)


@pytest.mark.parametrize(("sharing", "world"), [
    pytest.param(*case, marks=[] if case is SHARED[0] else pytest.mark.slow) for case in SHARED], ids=str)
def test_random_plans_of_experts_with_adapters(
    saved: Callable[[str], Path], tmp_path: Path, sharing: int, world: World
) -> None:
    seeds = [1] if world is SHARED[0][1] else range(3)
    shares = (f"train.expert_parallel={sharing}",) * (sharing > 1)
    check(saved(world.preset), tmp_path, world, OF_EXPERTS, seeds, *shares, tolerance=1e-5,
          before=partial(in_force, sharing) if shares else int)


def check(
    base: Path, tmp_path: Path, world: World, settings: LoraSettings, seeds: Iterable[int], *more: str,
    tolerance: float = TOLERANCE, before: Callable[[], Any] = int,
) -> None:
    """Loss and all gradients of adapters with these settings beside PEFT's, under random plans."""
    frozen, rate = (world.freeze,) if world.freeze else (), settings.dropout
    save(with_adapters(world.preset, settings, frozen), tmp_path)
    plain = PeftModel.from_pretrained(plain_copy(rough_model(preset=world.preset)), tmp_path, is_trainable=True)
    dropouts = replace_dropout(plain) if rate else []
    wanted, without = {}, {}
    for sample, payload in SAMPLES[world.preset]:
        for dropout in dropouts:
            dropout.keys = token_keys(0, STEP, sample.id, sample.num_tokens)
        wanted[sample.id] = own_gradients(plain, payload, settings.rank)
        with torch.no_grad(), patch.object(Dropout, "forward", lambda self, x: x):
            mean, count = plain_loss(plain.base_model.model, payload)
            without[sample.id] = float(mean) * count if count else 0.0
    torch.save(wanted, tmp_path / "gradients")
    torch.save(without, tmp_path / "losses without dropout")
    config = load([f"model.path={base}", "model.preset=", f"planner.sync={world.sync}",
                   f"comm.transport={world.transport}", f"train.freeze=[{world.freeze}]",
                   f"train.activation_checkpointing={str(world.recomputes).lower()}",
                   f"train.lora.rank={settings.rank}", f"train.lora.alpha={settings.alpha}",
                   f"train.lora.targets=[{','.join(settings.targets)}]",
                   f"train.lora.dropout={rate}", "comm.timeout_s=60", "run.dir=unused",
                   "train.adam_beta1=0", "train.clip_norm=0", *more])
    plans = [random_plan(seed, world) for seed in seeds]
    results = run_processes(run_adapted, world.num_ranks, world, config, plans, tmp_path, before,
                            timeout_s=WATCHDOG_S * (len(plans) + 1))[0][0]
    assert len(results) == len(plans)
    for errors in results:
        assert errors["loss"] < tolerance, errors
        assert errors["gradient"] < tolerance, errors


