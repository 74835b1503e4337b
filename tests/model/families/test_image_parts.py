"""An image in parts on several ranks: features and gradients are those of the whole image on one, in every family that
can cut it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.link import Link
from dhp_ray.model.attention import PackContext
from dhp_ray.model.families.qwen_encoder import cuts_of
from dhp_ray.planner.image_parts import most_parts
from dhp_ray.planner.plan import Grid
from tests.packs import relative_errors, rough_model
from tests.ranks import run_ranks

CASES: list[tuple[str, Grid, int]] = [
    (preset, grid, count) for preset in ("tiny", "tiny_qwen3_vl")
    for grid, count in (((1, 12, 20), 2), ((1, 12, 20), 3), ((2, 12, 14), 3), ((1, 40, 12), 5))]


def patches_of(tokens: torch.Tensor) -> torch.Tensor:
    """Of these tokens, four each."""
    return (4 * tokens[:, None] + torch.arange(4)).flatten()


def errors_of_part(
    rank: int, preset: str, grid: Grid, count: int, recomputes: bool, freeze: list[str]
) -> tuple[list[int], float, float]:
    """This rank's tokens, and the largest errors of their features and of all gradients."""
    adapter = rough_model(preset=preset)
    adapter.freeze(freeze)
    adapter.set_activation_checkpointing(recomputes)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(grid[0] * grid[1] * grid[2], adapter.patch_dim, generator=generator)
    whole = adapter.encode(pixels, adapter.encoder_arguments([grid]))
    weights = torch.randn(whole.shape, generator=generator)
    parameters = {name: parameter for name, parameter in adapter.module.named_parameters()
                  if adapter.is_vision(name) and parameter.requires_grad}
    wanted = dict(zip(parameters, torch.autograd.grad((whole * weights).sum(), list(parameters.values()),
                                                      materialize_grads=True))) if parameters else {}
    part = adapter.image_parts(grid, count)[rank]
    context = PackContext(part.layout, Link(range(count), rank, dist.group.WORLD), False)
    features = adapter.encode(pixels[patches_of(part.tokens)], part.arguments, context)
    error = float((features - whole[part.tokens]).detach().abs().max() / whole.detach().abs().max())
    if not parameters:
        assert not features.requires_grad
        return part.tokens.tolist(), error, 0.0
    features.backward(weights[part.tokens])
    found = {name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
             for name, parameter in parameters.items()}
    for gradient in found.values():
        dist.all_reduce(gradient)
    return part.tokens.tolist(), error, max(relative_errors(found, wanted).values())


@pytest.mark.parametrize(("preset", "grid", "count"), [
    case if number in (1, 6) else pytest.param(*case, marks=pytest.mark.slow) for number, case in enumerate(CASES)])
@pytest.mark.parametrize(("recomputes", "freeze"), [
    (True, []), pytest.param(False, [], marks=pytest.mark.slow), pytest.param(False, ["vision"], marks=pytest.mark.slow)
])
def test_parts_are_the_whole(preset: str, grid: Grid, count: int, recomputes: bool, freeze: list[str]) -> None:
    results = run_ranks(errors_of_part, count, preset, grid, count, recomputes, freeze)
    assert sorted(token for tokens, *_ in results for token in tokens) == list(range(grid[0] * grid[1] * grid[2] // 4))
    assert max(max(errors) for _, *errors in results) < 1e-5, results


@pytest.mark.parametrize(("preset", "piece"), [("tiny", 64), ("tiny_qwen3_vl", 4)])
@pytest.mark.parametrize("grid", [(1, 8, 16), (1, 12, 20), (2, 12, 14), (1, 40, 12), (3, 18, 26)])
def test_parts_are_as_long_as_can_be(preset: str, piece: int, grid: Grid) -> None:
    """Of every number of parts that the planner may ask for none is empty, or longer than an equal one by more than a
    piece."""
    adapter = rough_model(preset=preset)
    num_patches = grid[0] * grid[1] * grid[2]
    assert adapter.shape(adapter.module.config).piece_patches == piece
    for count in range(grid[0] + 1, min(9, most_parts(grid, piece)) + 1):
        sizes = [4 * len(part.tokens) for part in adapter.image_parts(grid, count)]
        assert sum(sizes) == num_patches
        assert 0 < min(sizes) <= max(sizes) <= num_patches / count + piece


def test_cuts_are_next_to_equal_ones() -> None:
    assert cuts_of([0, 16, 32, 36, 44, 60], 3) == [0, 16, 36, 60]
    assert cuts_of([0, 10, 20, 30], 2) == [0, 10, 30], "the first of two that are as near"
    assert all(start < stop for start, stop in pairwise(cuts_of(range(0, 61, 4), 15)))


def test_more_parts_than_there_are_pieces_are_refused() -> None:
    for preset, grid, count in (("tiny", (1, 8, 16), 3), ("tiny_qwen3_vl", (1, 4, 4), 5)):
        with pytest.raises(ValueError, match=rf"^an image of .* patches in {count} parts; allowed: at most as many"):
            rough_model(preset=preset).image_parts(grid, count)
    with pytest.raises(ValueError, match=r"^an image of \(2, 4, 4\) patches in 3 parts; allowed: one part for each st"):
        rough_model(preset="tiny_internvl").image_parts((2, 4, 4), 3)
