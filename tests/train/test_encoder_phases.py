"""A rank's two phases, in one process: the same features and gradients however activations are kept."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Grid, RankPlan, VisionPlan
from dhp_ray.train.images_apart import EncoderPhases, received_rows
from dhp_ray.train.step_inputs import collated
from tests.packs import make_pack, make_sample, rough_model

PARTS: dict[str, list[int | Grid]] = {
    "a": [20, (1, 4, 8), 30, (1, 8, 6), 7], "b": [33], "c": [9, (1, 4, 4), 11]}
MADE = {preset: [make_sample(name, parts, preset=preset) for name, parts in PARTS.items()]
        for preset in ("tiny", "tiny_qwen3_vl", "tiny_internvl")}
CPU = torch.device("cpu")


def phases_of(adapter: LanguageModel, keeps: bool, pass_patches: int, preset: str = "tiny") -> EncoderPhases:
    (first, second, third), payloads = zip(*MADE[preset])
    packs = (make_pack(0, [0], [first, second]), make_pack(1, [0], [third]))
    plan = RankPlan(1, 0, (), packs, (), "", VisionPlan("world", keeps, pass_patches), packs)
    inputs = collated(plan, dict(zip(PARTS, payloads)), adapter)
    assert inputs.vision is not None
    return EncoderPhases(adapter, inputs.vision, keeps, [own.received_from for own in inputs.inputs], CPU)


def calls_of_encode(adapter: LanguageModel) -> list[int]:
    """The patches of each call of the encoder from now on."""
    calls: list[int] = []
    encode = adapter.encode

    def noted(pixels: Tensor, *arguments: Any) -> Tensor:
        calls.append(len(pixels))
        return encode(pixels, *arguments)

    adapter.encode = noted  # type: ignore[method-assign]
    return calls


def test_rows_come_rank_by_rank_and_pack_by_pack() -> None:
    counts, rows = received_rows([{2: 2, 0: 1}, {}, {2: 1}, {0: 2}], CPU)
    assert counts == {0: 3, 2: 3}
    assert [of_pack.tolist() for of_pack in rows] == [[0, 3, 4], [], [5], [1, 2]]


@pytest.mark.parametrize(("preset", "keeps", "pass_patches", "num_passes"), [
    ("tiny", True, 0, 1), ("tiny", False, 0, 1), ("tiny", True, 40, 3), ("tiny", False, 40, 3), ("tiny", False, 64, 2),
    ("tiny_qwen3_vl", False, 64, 2), ("tiny_internvl", True, 16, 3)])
def test_features_and_gradients_are_those_of_the_encoder_in_one_go(
    preset: str, keeps: bool, pass_patches: int, num_passes: int
) -> None:
    """To the last bit where they come of one pass."""
    adapter = rough_model(preset=preset)
    phases = phases_of(adapter, keeps, pass_patches, preset)
    grids = [grid for sample, _ in MADE[preset] for grid in sample.vision_grids]
    pixels = torch.cat([torch.as_tensor(patches) for _, payload in MADE[preset] for patches in payload.pixels])
    wanted = adapter.encode(pixels, adapter.encoder_arguments(grids))
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    wanted.backward(weights)
    expected = gradients(adapter)
    sizes = [sum(sample.vision_tokens for sample, _ in MADE[preset][:2]), MADE[preset][2][0].vision_tokens]

    calls = calls_of_encode(adapter)
    of_packs = phases.encode(PackCommunicator([0], 0, None))
    assert [len(features) for features in of_packs] == sizes
    assert len(calls) == num_passes
    assert_close(torch.cat(of_packs).detach(), wanted.detach(), num_passes)
    for features, weight in zip(of_packs, weights.split(sizes)):
        assert features.is_leaf
        (features.requires_grad_() * weight).sum().backward()
    assert all(parameter.grad is None for parameter in adapter.module.parameters())
    phases.backward(PackCommunicator([0], 0, None))
    assert len(calls) == num_passes * (1 if keeps else 2)
    found = gradients(adapter)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, num_passes, name)


def assert_close(found: Tensor, expected: Tensor, num_passes: int, name: str = "features") -> None:
    limit = 0.0 if num_passes == 1 else 1e-6
    assert float((found - expected).abs().max()) <= limit * max(1.0, float(expected.abs().max())), name


class Saved:
    """A tensor that autograd keeps for a backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_in_phases(keeps: bool, pass_patches: int) -> tuple[int, int]:
    """Tensors that the encoder's backward pass waits for: after the first phase, and the most in the second."""
    adapter, saved, made, most = rough_model(), weakref.WeakSet[Saved](), weakref.WeakSet[Tensor](), 0
    phases, encode = phases_of(adapter, keeps, pass_patches), adapter.encode

    def noted(*arguments: Any) -> Tensor:
        made.add(features := encode(*arguments))
        return features

    def pack(tensor: Tensor) -> Saved:
        nonlocal most
        found = Saved(tensor)
        saved.add(found)
        most = max(most, len(saved))
        return found

    adapter.encode = noted  # type: ignore[method-assign]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found.tensor):
        of_packs = phases.encode(PackCommunicator([0], 0, None))
        between, most = len(saved), len(saved)
    assert bool(made) == keeps, "features of passes are let go, or kept with what made them"
    for features in of_packs:
        features.requires_grad_().sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found.tensor):
        phases.backward(PackCommunicator([0], 0, None))
    assert not saved
    assert not made
    return between, most


def test_activations_are_kept_or_made_again_pass_by_pass() -> None:
    one_pass = saved_in_phases(True, 0)[0]
    assert one_pass > 50
    assert saved_in_phases(True, 40) == (3 * one_pass, 3 * one_pass)
    assert saved_in_phases(False, 40) == (0, one_pass)


def gradients(adapter: LanguageModel) -> dict[str, Tensor]:
    """Of all parameters that have some, which are cleared."""
    found = {}
    for name, parameter in adapter.module.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    assert found
    return found


@pytest.mark.parametrize("evaluates", [True, False])
def test_without_gradients_there_is_one_phase(evaluates: bool) -> None:
    adapter = rough_model()
    calls = calls_of_encode(adapter)
    if not evaluates:
        adapter.freeze(["vision"])
    with torch.set_grad_enabled(not evaluates):
        phases = phases_of(adapter, True, 0)
        assert not any(features.requires_grad for features in phases.encode(PackCommunicator([0], 0, None)))
        phases.backward(PackCommunicator([0], 0, None))
    assert len(calls) == 1
    assert all(parameter.grad is None for parameter in adapter.module.parameters())
