"""A rank's two phases, in one process: the same features and gradients however activations are kept."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dhp_ray.comm.link import Link
from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.planner.plan import RankPlan, VisionPlan
from dhp_ray.train.encoder_phases import EncoderPhases, received_rows
from dhp_ray.train.step_inputs import collated
from tests.packs import make_pack, make_sample, rough_model

MADE = [make_sample("a", [20, (1, 4, 8), 30, (1, 8, 6), 7]), make_sample("b", [33]),
        make_sample("c", [9, (1, 4, 4), 11])]
PACKS = (make_pack(0, [0], [MADE[0][0], MADE[1][0]]), make_pack(1, [0], [MADE[2][0]]))
CPU = torch.device("cpu")


class Passes:
    """Counts what is told to an engine."""

    num_ended = 0

    def end_pack(self) -> None:
        self.num_ended += 1


def phases_of(adapter: ModelAdapter, keeps: bool, pass_patches: int, engine: Passes) -> EncoderPhases:
    plan = RankPlan(1, 0, (), PACKS, (), "", VisionPlan("world", keeps, pass_patches), PACKS)
    inputs = collated(plan, {sample.id: payload for sample, payload in MADE}, adapter)
    assert inputs.vision is not None
    return EncoderPhases(adapter, cast(Any, engine), inputs.vision, keeps,
                         [own.received_from for own in inputs.inputs], CPU)


def test_rows_come_rank_by_rank_and_pack_by_pack() -> None:
    counts, rows = received_rows([{2: 2, 0: 1}, {}, {2: 1}, {0: 2}], CPU)
    assert counts == {0: 3, 2: 3}
    assert [of_pack.tolist() for of_pack in rows] == [[0, 3, 4], [], [5], [1, 2]]


@pytest.mark.parametrize(("keeps", "pass_patches", "num_passes"), [
    (True, 0, 1), (False, 0, 1), (True, 40, 3), (False, 40, 3), (False, 64, 2)])
def test_features_and_gradients_are_those_of_the_encoder_in_one_go(
    keeps: bool, pass_patches: int, num_passes: int
) -> None:
    adapter, engine = rough_model(), Passes()
    phases = phases_of(adapter, keeps, pass_patches, engine)
    grids = [grid for sample, _ in MADE for grid in sample.vision_grids]
    pixels = torch.cat([torch.as_tensor(patches) for _, payload in MADE for patches in payload.pixels])
    wanted = adapter.encode(pixels, adapter.encoder_arguments(grids))
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    wanted.backward(weights)
    expected = gradients(adapter)

    of_packs = phases.encode(Link([0], 0, None))
    assert [len(features) for features in of_packs] == [20, 4]
    assert engine.num_ended == num_passes
    torch.testing.assert_close(torch.cat(of_packs).detach(), wanted.detach(), rtol=1e-6, atol=1e-6)
    for features, weight in zip(of_packs, weights.split([20, 4])):
        assert features.requires_grad
        (features * weight).sum().backward()
    phases.backward(Link([0], 0, None))
    assert engine.num_ended == 2 * num_passes
    found = gradients(adapter)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()), msg=name)


def gradients(adapter: ModelAdapter) -> dict[str, Tensor]:
    """Of all parameters that have some, which are cleared."""
    found = {}
    for name, parameter in adapter.module.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    assert found
    return found


@pytest.mark.parametrize("evaluates", [True, False])
def test_without_gradients_there_is_one_phase(evaluates: bool) -> None:
    adapter, engine = rough_model(), Passes()
    if not evaluates:
        adapter.freeze(["vision"])
    with torch.set_grad_enabled(not evaluates):
        phases = phases_of(adapter, True, 0, engine)
        assert not any(features.requires_grad for features in phases.encode(Link([0], 0, None)))
        phases.backward(Link([0], 0, None))
    assert engine.num_ended == 1
    assert all(parameter.grad is None for parameter in adapter.module.parameters())
