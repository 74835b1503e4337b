"""Cross entropy over a large vocabulary, summed over tokens, without ever holding the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100
CHUNK_ELEMENTS = 1 << 25
"""Logits held at a time: 128 MiB in fp32."""
CHUNKS_PER_PRODUCT = 8
"""Chunks whose gradients are collected, in the computing type, for one product with the head and one with its inputs.

Each product with the inputs reads and writes the whole fp32 gradient of the head, `V D` elements, so it must be rare.
On a CPU the number does not matter.
"""


class Head(nn.Linear):
    """A language model's head, whose weight is used by calling it, so that FSDP can gather it separately."""

    def forward(self, hidden: Tensor, compute: Callable[..., Tensor] = nn.functional.linear, *arguments: Any) -> Tensor:
        """Return `compute(hidden, weight, *arguments)`: by default the logits."""
        return compute(hidden, self.weight, *arguments)


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, valid_index: Tensor, chunk_elements: int = CHUNK_ELEMENTS,
    chunks_per_product: int = CHUNKS_PER_PRODUCT,
) -> Tensor:
    """Sum over tokens of the cross entropy between `hidden @ weight.T` and `labels`, as an fp32 scalar.

    Shapes: hidden (L, D), weight (V, D), labels (L,) int64, already shifted, valid_index (K,) int64: the tokens that
    count, `valid_tokens(labels)`, found on the host. The others cost nothing. Without a valid token the sum is 0 and
    every gradient is 0, not NaN and not None.

    The gradients of a few chunks' logits are kept and turned into gradients of `hidden` and `weight` in the forward
    pass (as in Liger Kernel, arXiv 2410.10989, section 3.2), so nothing is computed twice. The backward pass scales
    them in place: it can run once.
    """
    tokens, rows = (max(1, chunk_elements // size) for size in weight.shape)
    return _CrossEntropySum.apply(
        hidden.index_select(0, valid_index), weight, labels.index_select(0, valid_index)[:, None],
        tokens, chunks_per_product, rows, torch.is_grad_enabled())


def most_likely(
    hidden: Tensor, weight: Tensor, valid_index: Tensor, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """The index of the largest logit of `hidden` (L, D) with `weight` (V, D) at `valid_index` (K,): (K,) int64."""
    parts = hidden.index_select(0, valid_index).split(max(1, chunk_elements // weight.shape[0]))
    return torch.cat([(part @ weight.T).float().argmax(1) for part in parts])


def valid_tokens(labels: Tensor) -> Tensor:
    """Where the tokens of `labels` (L,) are that count, (K,) int64: those not labelled -100. Reads the labels."""
    return (labels != IGNORED).nonzero()[:, 0]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, tokens: int, per_product: int, rows: int,
        with_gradients: bool,
    ) -> Tensor:
        """The work is cut into chunks of `tokens`, `per_product` of which make a product; of the head's gradient `rows`
        are added at a time.
        """
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if with_gradients and ctx.needs_input_grad[0] else None
        # Summed over products in fp32, whatever the compute type.
        weight_gradient = torch.zeros_like(weight,
                                           dtype=torch.float32) if with_gradients and ctx.needs_input_grad[1] else None
        several = tokens * (per_product if weight_gradient is not None else 1)
        slopes = hidden.new_empty(  # d loss / d logits
            min(several, hidden.shape[0]) if hidden_gradient is not None or weight_gradient is not None else 0,
            weight.shape[0])
        for start in range(0, hidden.shape[0], several):
            inputs, targets = hidden[start:start + several], labels[start:start + several]
            slope = slopes[:inputs.shape[0]]
            for part, target, out in zip(inputs.split(tokens), targets.split(tokens),
                                         slope.split(tokens) if slope.shape[0] else repeat(None)):
                total += _loss_of_chunk(part, weight, target, out)
            if hidden_gradient is not None:
                torch.mm(slope, weight, out=hidden_gradient[start:start + several])
            if weight_gradient is not None:
                _add_product(weight_gradient, slope, inputs, rows)
        ctx.gradients = (hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        hidden_gradient, weight_gradient = ctx.gradients
        del ctx.gradients  # in place: that of the weights is as large as they are
        if hidden_gradient is not None:
            hidden_gradient.mul_(scale)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.mul_(scale).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, *(None,) * 5


def _loss_of_chunk(hidden: Tensor, weight: Tensor, target: Tensor, slope: Tensor | None) -> Tensor:
    """The summed cross entropy, in fp32. Writes d loss / d logits = softmax - one-hot to `slope`."""
    logits = (hidden @ weight.T).float()  # (tokens, V)
    logits.sub_(logits.amax(1, keepdim=True))
    of_target = logits.gather(1, target)
    norm = logits.exp_().sum(1, keepdim=True)
    if slope is not None:
        slope.copy_(logits.div_(norm).scatter_add_(1, target, torch.full_like(norm, -1.0)))
    return (norm.log() - of_target).sum()


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor, rows: int) -> None:
    """Adds `slope.T @ hidden` (V, D) to `total` in fp32."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, hidden)
        return
    for part, of_part in zip(total.split(rows), slope.split(rows, dim=1)):
        part += of_part.T @ hidden
