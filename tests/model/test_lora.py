"""Adapters: beside PEFT on plain transformers, for every family."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from dhp_ray.model.build import adapter_sizes, read_config
from dhp_ray.model.files import ADAPTER_FILE, ADAPTER_PREFIX, ADAPTER_SETTINGS, ModelError
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.lora import LoraLinear, LoraSettings, first_values, write_settings
from dhp_ray.train.collate import Payload
from tests.one_rank import VIDEO, loss_of
from tests.packs import (
    EXPERT_PRESETS,
    PATCH_DIMS,
    PRESETS,
    TEXT_PRESETS,
    make_sample,
    plain_copy,
    plain_gradients,
    plain_loss,
    relative_errors,
    rough_model,
    save_model,
)

ALL = LoraSettings(4, 8.0, ("all-linear",))
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
OF_EXPERTS = LoraSettings(8, 16.0, ("q_proj", *EXPERTS))


def with_adapters(
    preset: str = "tiny", settings: LoraSettings = ALL, frozen: tuple[str, ...] = ()
) -> LanguageModel:
    """A model with rough weights, and adapters that add something."""
    adapter = rough_model(preset=preset)
    adapter.freeze(frozen)
    adapter.add_lora(settings)
    with torch.no_grad():
        for name, parameter in adapter.module.named_parameters():
            if "lora_B" in name:
                parameter.copy_(first_values(name.replace("lora_B", "lora_A"), parameter.shape, 7))
    return adapter


def save(adapter: LanguageModel, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    save_model(adapter, folder, {name: value.detach() for name, value in adapter.module.named_parameters()})
    return load_file(folder / ADAPTER_FILE)


@pytest.mark.parametrize(("preset", "frozen"), [
    *((preset, ()) for preset in (*PATCH_DIMS, *TEXT_PRESETS)), ("tiny", ("vision",)), ("tiny_internvl", ("language",)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in product(PATCH_DIMS, (("vision",), ("language",)))
      if case not in (("tiny", ("vision",)), ("tiny_internvl", ("language",))))], ids=str)
def test_peft_loads_what_is_saved(tmp_path: Path, preset: str, frozen: tuple[str, ...]) -> None:
    adapter = with_adapters(preset, frozen=frozen)
    base = rough_model(preset=preset)
    saved = save(adapter, tmp_path)
    loaded = PeftModel.from_pretrained(plain_copy(base), tmp_path)
    settings = loaded.peft_config["default"]
    assert (settings.r, settings.lora_alpha) == (4, 8.0)
    own = get_peft_model_state_dict(get_peft_model(plain_copy(base), LoraConfig(
        r=4, lora_alpha=8, target_modules=settings.target_modules)))
    assert {name: value.shape for name, value in saved.items()} == {name: value.shape for name, value in own.items()}
    film = replace(VIDEO, seconds=2.0)  # transformers 5.17 drops the fraction of a second
    for parts in ([20, (1, 4, 8), 30], [5, film, 30], [40]):
        _, payload = sample = make_sample("any", parts, preset=preset)
        mean, count = plain_loss(loaded.base_model.model, payload)
        assert loss_of(adapter, *sample).item() / count == pytest.approx(mean.item(), rel=1e-5)


def own_gradients(plain: PeftModel, payload: Payload, rank: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss sum of a sample by PEFT, and the gradients of all adapters by our names, in our shapes."""
    loss, gradients = plain_gradients(plain.base_model.model, [payload])
    found = {name.replace(".default.", "."): value for name, value in gradients.items() if "lora_" in name}
    for name, value in found.items():
        if ".experts." in name:
            found[name] = (value.view(-1, rank, value.shape[1]) if "lora_A" in name
                           else value.view(len(value), rank, -1).permute(2, 0, 1))
    return loss, found


@pytest.mark.parametrize(("preset", "targets"), [
    ("tiny_qwen3_moe", OF_EXPERTS.targets), ("tiny_qwen3_vl_moe", ("all-linear", *EXPERTS)),
    ("tiny_qwen3_5_moe", ("layers.0.mlp.experts.gate_up_proj", "experts.down_proj")),
    *(pytest.param(preset, targets, marks=pytest.mark.slow) for preset in EXPERT_PRESETS for targets in (
        EXPERTS, EXPERTS[:1], EXPERTS[1:], ("2.mlp.experts.down_proj",)))], ids=str)
def test_adapters_of_experts_beside_peft(tmp_path: Path, preset: str, targets: tuple[str, ...]) -> None:
    """What PEFT loads has its own names and shapes, our loss, and our gradients of all adapters."""
    adapter = with_adapters(preset, replace(OF_EXPERTS, targets=targets))
    saved = save(adapter, tmp_path)
    plain = PeftModel.from_pretrained(plain_copy(rough_model(preset=preset)), tmp_path, is_trainable=True)
    own = get_peft_model_state_dict(plain)
    assert own.keys() == saved.keys()
    assert all(torch.equal(own[name], saved[name]) for name in saved)
    for parts in ([20, (1, 4, 8), 30], [1], [40]):
        _, payload = sample = make_sample("any", parts, preset=preset)
        adapter.module.zero_grad()
        loss = loss_of(adapter, *sample)
        loss.backward()
        wanted, gradients = own_gradients(plain, payload, OF_EXPERTS.rank)
        assert loss.item() == pytest.approx(wanted, rel=1e-5)
        found = {name: torch.zeros_like(value) if value.grad is None else value.grad
                 for name, value in adapter.module.named_parameters() if value.requires_grad}
        assert {name: value.shape for name, value in found.items()} == {
            name: value.shape for name, value in gradients.items()}
        assert max(relative_errors(found, gradients).values()) < 1e-5


def test_adapters_of_experts_begin_as_peft_s() -> None:
    """B is 0, A uniform within 1 / sqrt(in): nothing is added at first."""
    adapter = rough_model(preset="tiny_qwen3_moe")
    adapter.add_lora(OF_EXPERTS)
    peft = get_peft_model(plain_copy(rough_model(preset="tiny_qwen3_moe")), LoraConfig(
        r=8, target_modules=[], target_parameters=[*EXPERTS]))
    theirs = get_peft_model_state_dict(peft)
    for name, value in adapter.module.named_parameters():
        if ".experts." in name and "lora_" in name:
            other = theirs[ADAPTER_PREFIX + name]
            assert value.numel() == other.numel()
            assert value.std().item() == pytest.approx(other.std().item(), rel=0.1)
            assert value.abs().max().item() == pytest.approx(other.abs().max().item(), rel=0.01)


@pytest.mark.parametrize(("preset", "settings"), [
    ("tiny", ALL), ("tiny_qwen3", ALL), ("tiny_qwen3_moe", OF_EXPERTS)], ids=["tiny", "tiny_qwen3", "experts"])
def test_peft_finds_the_base_of_what_is_saved(tmp_path: Path, preset: str, settings: LoraSettings) -> None:
    """With nothing but the adapter's folder."""
    base = rough_model(preset=preset)
    save_model(base, tmp_path / "base", dict(base.module.named_parameters()))
    adapter = with_adapters(preset, settings)
    saved = save(adapter, tmp_path)
    write_settings(tmp_path, adapter.module, settings, str(tmp_path / "base"))
    loaded = AutoPeftModel.from_pretrained(tmp_path)
    assert type(loaded.base_model.model) is type(base.module)
    found = get_peft_model_state_dict(loaded)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    get_peft_model(plain_copy(base), LoraConfig(r=4, target_modules="all-linear")).save_pretrained(tmp_path / "own")
    mine, theirs = (json.loads((folder / ADAPTER_SETTINGS).read_text()) for folder in (tmp_path, tmp_path / "own"))
    assert mine["auto_mapping"] == theirs["auto_mapping"]


def test_all_linear_is_what_peft_calls_so() -> None:
    """But for experts and their routers, which get none here."""
    for preset in PRESETS:
        own = get_peft_model_state_dict(get_peft_model(plain_copy(rough_model(preset=preset)), LoraConfig(
            r=4, target_modules="all-linear")))
        module = with_adapters(preset).module
        found = {ADAPTER_PREFIX + name for name, parameter in module.named_parameters() if parameter.requires_grad}
        assert found == {name for name in own if ".mlp.experts." not in name and ".mlp.gate.lora" not in name}


def test_targets_are_ends_of_names() -> None:
    names = [name for name, layer in with_adapters(settings=LoraSettings(2, 4.0, ("q_proj", "0.mlp.up_proj")),
                                                   frozen=("vision",)).module.named_modules()
             if isinstance(layer, LoraLinear)]
    queries = [f"{layer}.self_attn.q_proj" for layer in range(3)]
    assert sorted(names) == [f"model.language_model.layers.{end}" for end in ("0.mlp.up_proj", *queries)]


@pytest.mark.parametrize(("targets", "frozen", "error"), [
    (("q_proj", "c_attn"), (), "'c_attn' names no linear layer that may be trained; allowed: all-linear, or the end of "
     "a name: 0, 2, down_proj, gate_proj, k_proj, o_proj, proj, q_proj, qkv, up_proj, v_proj"),
    (("qkv",), ("vision",), "'qkv' names no linear layer that may be trained; allowed: all-linear, or the end of a "
     "name: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    (("lm_head",), (), "'lm_head' names no linear layer"),
    (EXPERTS, (), "'experts.gate_up_proj' names no linear layer that may be trained; allowed: all-linear, or"),
])
def test_targets_that_match_nothing(targets: tuple[str, ...], frozen: tuple[str, ...], error: str) -> None:
    with pytest.raises(ModelError) as raised:
        with_adapters(settings=LoraSettings(2, 4.0, targets), frozen=frozen)
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("settings", "frozen", "error"), [
    ({"targets": (target,)}, (), f"train.lora.targets: {target!r} names no linear layer that may be trained; allowed: "
     "all-linear, or the end of a name: experts.down_proj, experts.gate_up_proj, k_proj, o_proj, q_proj, v_proj")
    for target in ("down_proj", "gate_up_proj", "mlp.gate", "mlp.gate.weight", "experts", "perts.down_proj")] + [
    ({}, ("language",), "train.lora.targets: 'q_proj' names no linear layer that may be trained; allowed: all-linear"),
    ({"rank": 12}, (), "train.lora.rank: got 12 with adapters of experts; allowed: multiples of 8"),
    ({"dropout": 0.1}, (), "train.lora.dropout: got 0.1 with adapters of experts; allowed: 0")])
def test_adapters_of_experts_that_are_refused(settings: dict[str, Any], frozen: tuple[str, ...], error: str) -> None:
    with pytest.raises(ModelError) as raised:
        with_adapters("tiny_qwen3_moe", replace(OF_EXPERTS, **settings), frozen)
    assert str(raised.value).startswith(error)
    assert "\n" not in str(raised.value)


def test_dropout_is_of_the_language_model(tmp_path: Path) -> None:
    dropping = LoraSettings(2, 4.0, ("all-linear",), dropout=0.1)
    with pytest.raises(ModelError) as raised:
        with_adapters(settings=dropping)
    assert str(raised.value) == (
        "train.lora.dropout: got 0.1 with an adapter in the vision encoder (model.visual.blocks.0.attn.qkv); allowed: "
        "0, or train.freeze=vision")
    save(with_adapters(settings=dropping, frozen=("vision",)), tmp_path)
    assert LoraConfig.from_pretrained(tmp_path).lora_dropout == 0.1
    with_adapters(settings=LoraSettings(2, 4.0, ("q_proj",), dropout=0.1))  # no layer of the encoder has this name


def test_first_values_are_the_same_everywhere_and_add_nothing() -> None:
    first = first_values("a.lora_A.weight", (4, 100), 3)
    assert torch.equal(first, first_values("a.lora_A.weight", (4, 100), 3))
    assert not torch.equal(first, first_values("b.lora_A.weight", (4, 100), 3))
    assert not torch.equal(first, first_values("a.lora_A.weight", (4, 100), 4))
    assert 0.09 < first.abs().max() <= 0.1
    assert not first_values("a.lora_B.weight", (100, 4), 3).any()


def test_sizes_without_weights(tmp_path: Path) -> None:
    base = rough_model()
    save_model(base, tmp_path, {name: value.detach() for name, value in base.module.named_parameters()})
    for frozen in ((), ("vision",), ("language",)):
        adapter = with_adapters(frozen=frozen)
        sizes = {part: sum(value.numel() for name, value in adapter.module.named_parameters()
                           if value.requires_grad and adapter.is_vision(name) == (part == "vision"))
                 for part in ("vision", "language") if part not in frozen}
        assert adapter_sizes(read_config(str(tmp_path)), frozen, ALL) == sizes


def test_sizes_of_adapters_of_experts(tmp_path: Path) -> None:
    base = rough_model(preset="tiny_qwen3_moe")
    save_model(base, tmp_path, {name: value.detach() for name, value in base.module.named_parameters()})
    for targets, layers in ((OF_EXPERTS.targets, 3), (EXPERTS, 0)):
        sizes = adapter_sizes(read_config(str(tmp_path)), (), replace(OF_EXPERTS, targets=targets))
        assert sizes == {"language": layers * 8 * (128 + 128), "experts": 3 * 6 * 8 * (2 * 128 + 3 * 96)}
