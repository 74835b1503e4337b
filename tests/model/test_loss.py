from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
def test_loss_and_gradients_equal_torchs_whatever_the_chunk(chunk_elements: int) -> None:
    hidden, weight, labels = make(33)
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum", ignore_index=-100)
    wanted = torch.autograd.grad(expected * 3, [hidden, weight])
    loss = loss_of(hidden, weight, labels, chunk_elements)
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
