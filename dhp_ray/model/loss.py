"""Cross entropy over a large vocabulary, summed over tokens, without ever holding the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

TakeGradient = Callable[[Tensor], None]

IGNORED = -100
CHUNK_ELEMENTS = 1 << 25
"""Logits held at a time: 128 MiB in fp32."""


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, valid_index: Tensor, chunk_elements: int = CHUNK_ELEMENTS,
    take_gradient: TakeGradient | None = None,
) -> Tensor:
    """Sum over tokens of the cross entropy between `hidden @ weight.T` and `labels`, as an fp32 scalar.

    Shapes: hidden (L, D), weight (V, D), labels (L,) int64, already shifted, valid_index (K,) int64: the tokens that
    count, `valid_tokens(labels)`, found on the host. The others cost nothing. Without a valid token the sum is 0 and
    every gradient is 0, not NaN and not None.

    The gradient of each chunk's logits is turned into gradients of `hidden` and `weight` while the chunk is there
    (as in Liger Kernel, arXiv 2410.10989, section 3.2), so nothing is computed twice.

    With `take_gradient` the backward pass calls it with the gradient of `weight`, fp32 and of its shape, and autograd
    gets none.
    """
    num_tokens = max(1, chunk_elements // weight.shape[0])
    result: Tensor = _CrossEntropySum.apply(
        hidden.index_select(0, valid_index), weight, labels.index_select(0, valid_index), num_tokens,
        torch.is_grad_enabled(), take_gradient)
    return result


def most_likely(
    hidden: Tensor, weight: Tensor, valid_index: Tensor, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """The index of the largest logit of `hidden` (L, D) with `weight` (V, D) at `valid_index` (K,): (K,) int64."""
    parts = hidden.index_select(0, valid_index).split(max(1, chunk_elements // weight.shape[0]))
    return torch.cat([(part @ weight.T).float().argmax(1) for part in parts])


class LossHead(Module):
    """A language model's head with its loss, as a module, so that forward hooks on it fire."""

    take_gradient: TakeGradient | None = None
    """See `cross_entropy_sum`."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor, labels: Tensor | None, valid_index: Tensor) -> Tensor:
        """See `cross_entropy_sum`; without labels see `most_likely`."""
        if labels is None:
            return most_likely(hidden, self.linear.weight, valid_index)
        return cross_entropy_sum(hidden, self.linear.weight, labels, valid_index, take_gradient=self.take_gradient)


def valid_tokens(labels: Tensor) -> Tensor:
    """Where the tokens of `labels` (L,) are that count, (K,) int64: those not labelled -100. Reads the labels."""
    return (labels != IGNORED).nonzero()[:, 0]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, with_gradients: bool,
        take_gradient: TakeGradient | None,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if with_gradients and ctx.needs_input_grad[0] else None
        # Summed over chunks in fp32, whatever the compute type.
        weight_gradient = torch.zeros_like(weight,
                                           dtype=torch.float32) if with_gradients and ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], chunk):
            part, target = hidden[start:start + chunk], labels[start:start + chunk, None]
            logits = (part @ weight.T).float()  # (chunk, V)
            log_sum = logits.logsumexp(1, keepdim=True)
            total += (log_sum - logits.gather(1, target)).sum()
            if hidden_gradient is None and weight_gradient is None:
                continue
            # d loss / d logits = softmax - one-hot, in place of the logits
            logits.sub_(log_sum).exp_().scatter_add_(1, target, torch.full_like(log_sum, -1.0))
            slope = logits.to(hidden.dtype)
            if hidden_gradient is not None:
                torch.mm(slope, weight, out=hidden_gradient[start:start + chunk])
            if weight_gradient is not None:
                weight_gradient += slope.T @ part
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype, ctx.take_gradient = weight.dtype, take_gradient
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if weight_gradient is not None:
            if ctx.take_gradient:
                ctx.take_gradient(weight_gradient.mul_(scale))  # in place: it is as large as the head, and used once
                weight_gradient = None
            else:
                weight_gradient = (weight_gradient * scale).to(ctx.weight_dtype)
        return (None if hidden_gradient is None else (hidden_gradient * scale).to(hidden_gradient.dtype),
                weight_gradient, None, None, None, None)
