from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dhp_ray.model.loss import CHUNK_ELEMENTS, cross_entropy_sum, valid_tokens


def make(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(num_tokens, 24, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 24, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 50, (num_tokens,), generator=generator)
    labels[::4] = -100
    return hidden, weight, labels


def loss_of(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_elements: int = CHUNK_ELEMENTS
) -> torch.Tensor:
    return cross_entropy_sum(hidden, weight, labels, valid_tokens(labels), chunk_elements)


@pytest.mark.parametrize("chunk_elements", [1, 50 * 7, 1 << 20])
@pytest.mark.parametrize("chunks_per_product", [1, 2, 100])
def test_loss_and_gradients_equal_torchs_whatever_the_chunk(chunk_elements: int, chunks_per_product: int) -> None:
    hidden, weight, labels = make(33)
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum", ignore_index=-100)
    wanted = torch.autograd.grad(expected * 3, [hidden, weight])
    loss = cross_entropy_sum(hidden, weight, labels, valid_tokens(labels), chunk_elements,
                             chunks_per_product=chunks_per_product)
    found = torch.autograd.grad(loss * 3, [hidden, weight])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 9])
def test_no_valid_token_gives_zero_and_zero_gradients(num_tokens: int) -> None:
    hidden, weight, labels = make(num_tokens)
    loss = loss_of(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.shape == hidden.shape
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_tokens_that_do_not_count_may_hold_anything() -> None:
    hidden, weight, labels = make(12)
    with torch.no_grad():
        hidden[::4] = float("inf")
    loss = loss_of(hidden, weight, labels)
    loss.backward()
    assert loss.isfinite()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_a_frozen_weight_still_passes_the_gradient_on() -> None:
    hidden, weight, labels = make(12)
    loss_of(hidden, weight.detach(), labels).backward()
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_computes_no_gradient() -> None:
    hidden, weight, labels = make(12)
    with torch.no_grad():
        loss = loss_of(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels, reduction="sum"))


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    hidden, weight, labels = make(12)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    loss = loss_of(hidden, weight, labels)
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(torch.autograd.grad(loss, [hidden, weight]),
                            torch.autograd.grad(expected, [hidden, weight])):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [True, False])
def test_the_head_is_multiplied_with_collected_gradients_once_for_several_chunks(trained: bool) -> None:
    """24 tokens count: in chunks of 4, collected by 3 if the head is trained, 2 products."""
    hidden, weight, labels = make(32)
    with Products() as products:
        cross_entropy_sum(hidden, weight if trained else weight.detach(), labels, valid_tokens(labels), 50 * 4,
                          chunks_per_product=3)
    assert products.shapes.count((50, 24)) == (2 if trained else 0)
    assert products.shapes.count((12, 24)) == (2 if trained else 0)
    assert products.shapes.count((4, 24)) == (0 if trained else 6)


class Products(TorchDispatchMode):
    """Records the shapes that matrix products have."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if "mm" in function.name():
            self.shapes.append(tuple(result.shape))
        return result


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, labels = make(12)
    loss = loss_of(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(AttributeError, match="gradients"):
        loss.backward()


def test_bf16_sums_in_fp32() -> None:
    hidden, weight, labels = make(4000, torch.bfloat16)
    # oneDNN's bf16 product takes AMX instructions, which some virtual machines advertise and then refuse.
    with torch.backends.mkldnn.flags(enabled=False):
        loss = loss_of(hidden, weight, labels, 50 * 16)
        loss.backward()
        expected = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    wanted = torch.autograd.grad(F.cross_entropy(hidden.float() @ weight.float().T, labels, reduction="sum"), weight)[0]
    assert loss.dtype == torch.float32
    assert weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert ((weight.grad - wanted).abs().max() / wanted.abs().max()).item() < 0.02
