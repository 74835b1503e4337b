"""Adapters under any plan in every mode: losses and gradients are those of PEFT on plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from dhp_ray.config import Config, load
from dhp_ray.model.lora import first_values, kept, layer_key, token_keys
from dhp_ray.planner.plan.types import Plan
from tests.model.test_lora import ALL, save, with_adapters
from tests.packs import (
    PATCH_DIMS,
    PRESETS,
    TEXT_PRESETS,
    plain_copy,
    plain_gradients,
    plain_loss,
    rough_model,
    save_model,
)
from tests.ranks import run_processes
from tests.train.random_plans import SAMPLES, STEP, TOLERANCE, WATCHDOG_S, World, random_plan, run_plans

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
    frozen = (world.freeze,) if world.freeze else ()
    save(with_adapters(world.preset, replace(ALL, dropout=rate), frozen), tmp_path)
    plain = PeftModel.from_pretrained(plain_copy(rough_model(preset=world.preset)), tmp_path, is_trainable=True)
    dropouts = replace_dropout(plain) if rate else []
    wanted, without = {}, {}
    for sample, payload in SAMPLES[world.preset]:
        for dropout in dropouts:
            dropout.keys = token_keys(0, STEP, sample.id, sample.num_tokens)
        loss, gradients = plain_gradients(plain.base_model.model, [payload])
        wanted[sample.id] = loss, {name.replace(".default.", "."): value for name, value in gradients.items()
                                   if "lora_" in name}
        with torch.no_grad(), patch.object(Dropout, "forward", lambda self, x: x):
            mean, count = plain_loss(plain.base_model.model, payload)
            without[sample.id] = float(mean) * count if count else 0.0
    torch.save(wanted, tmp_path / "gradients")
    torch.save(without, tmp_path / "losses without dropout")
    config = load([f"model.path={saved(world.preset)}", "model.preset=", f"planner.sync={world.sync}",
                   f"comm.transport={world.transport}", f"train.freeze=[{world.freeze}]",
                   f"train.activation_checkpointing={str(world.recomputes).lower()}",
                   "train.lora.rank=4", "train.lora.alpha=8",
                   f"train.lora.dropout={rate}", "comm.timeout_s=60", "run.dir=unused",
                   "train.adam_beta1=0", "train.clip_norm=0"])
    seeds = [1] if (world, rate) in FEW else range(3)  # the first one is of text alone
    results = run_on(world, config, [random_plan(seed, world) for seed in seeds], tmp_path)
    assert len(results) == len(seeds)
    for errors in results:
        assert errors["loss"] < TOLERANCE, errors
        assert errors["gradient"] < TOLERANCE, errors


def run_on(world: World, config: Config, plans: list[Plan], reference: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_processes(run_adapted, world.num_ranks, world, config, plans, reference,
                                                timeout_s=WATCHDOG_S * (len(plans) + 1))[0][0]
    return found


