from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dhp_ray.model.kernels import cpu
from tests.packs import plain_copy, relative_errors, rough_model

GRIDS = [(1, 4, 8), (1, 18, 26), (3, 10, 8), (1, 2, 2)]
"""Windows are of 8 x 8 patches: less than one, with remainders on both sides, with steps in time, one token."""


def pixels_of(grids: list[tuple[int, int, int]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(sum(time * height * width for time, height, width in grids), 3 * 2 * 14 * 14,
                       generator=generator)


def test_features_and_gradients_are_those_of_transformers() -> None:
    adapter, pixels = rough_model(), pixels_of(GRIDS)
    plain = plain_copy(adapter).model.visual
    wanted = plain(pixels, grid_thw=torch.tensor(GRIDS)).pooler_output
    found = adapter.encode(pixels, adapter.encoder_arguments(GRIDS))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradient = torch.randn_like(wanted)
    wanted.backward(gradient)
    found.backward(gradient)
    named: Any = adapter.module.model.visual
    errors = relative_errors({name: parameter.grad for name, parameter in named.named_parameters()},
                             {name: parameter.grad for name, parameter in plain.named_parameters()})
    assert max(errors.values()) < 1e-5, errors


class Convolutions(TorchDispatchMode):
    """Counts those that are computed in it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "convolution" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_are_embedded_by_a_product(dtype: torch.dtype) -> None:
    """The same values and gradients as by the convolution of transformers, under the same name; no convolution.

    That one computes in fp32: on some CPUs its gradient in bf16 is far from that in fp32.
    """
    adapter = rough_model()
    plain, ours = (model.model.visual.patch_embed.to(dtype)  # type: ignore[union-attr, operator]
                   for model in (plain_copy(adapter), adapter.module))
    plain, pixels = plain.to(torch.float32), pixels_of(GRIDS).to(dtype)
    wanted = plain(pixels.to(torch.float32))
    gradient = torch.randn_like(wanted).to(dtype)
    wanted.backward(gradient.to(torch.float32))
    with Convolutions() as counted:
        found = ours(pixels)
        found.backward(gradient)
    assert counted.count == 0
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.to(torch.float32), wanted, rtol=tolerance, atol=tolerance)
    ((name, weight),), ((plain_name, plain_weight),) = ours.named_parameters(), plain.named_parameters()
    assert (name, weight.shape) == (plain_name, plain_weight.shape)
    scale = plain_weight.grad.abs().max().item()
    torch.testing.assert_close(weight.grad.to(torch.float32), plain_weight.grad, rtol=tolerance, atol=tolerance * scale)


def test_arguments_name_windows_and_steps_in_time() -> None:
    arguments = rough_model().encoder_arguments([(1, 4, 12), (2, 4, 8)])
    assert arguments["cu_seqlens"].query_offsets == (0, 48, 80, 112)
    assert arguments["cu_window_seqlens"].query_offsets == (0, 32, 48, 80, 112)
    # rows of 6 vision tokens: 4 of each are the first window's
    assert arguments["window_index"].tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11, *range(12, 28)]
    assert arguments["position_ids"].shape == (112, 2)
    assert arguments["position_ids"][:8].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]


@pytest.mark.parametrize(("checkpointing", "forward"), [(False, 2), (True, 4)], ids=["kept", "recomputed"])
def test_a_block_calls_the_kernel_once_forward_and_once_backward(
    checkpointing: bool, forward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two blocks, one in windows; recomputation runs the forward again, and may change on a live model."""
    adapter, calls = rough_model(), Counter[str]()
    adapter.set_activation_checkpointing(not checkpointing)
    adapter.set_activation_checkpointing(checkpointing)

    def counted(name: str) -> Callable[..., Any]:
        kernel = getattr(cpu, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return kernel(*arguments)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(cpu, name, counted(name))
    adapter.encode(pixels_of(GRIDS), adapter.encoder_arguments(GRIDS)).sum().backward()
    assert calls == {"forward": forward, "backward": 2}
