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
        weight_gradient = None
        if with_gradients and ctx.needs_input_grad[1]:  # summed over products in fp32, whatever the compute type
            make = torch.empty_like if len(hidden) else torch.zeros_like
            weight_gradient = make(weight, dtype=torch.float32)
        several = tokens * (per_product if weight_gradient is not None else 1)
        slopes = hidden.new_empty(  # d loss / d logits
            min(several, hidden.shape[0]) if hidden_gradient is not None or weight_gradient is not None else 0,
            weight.shape[0])
        for start in range(0, hidden.shape[0], several):
            inputs, targets = hidden[start:start + several], labels[start:start + several]
            slope = slopes[:inputs.shape[0]]
            parts = [_softmax_of_chunk(part, weight, target, out)
                     for part, target, out in zip(inputs.split(tokens), targets.split(tokens),
                                                  slope.split(tokens) if slope.shape[0] else repeat(None))]
            of_target, norm = (torch.cat(values) for values in zip(*parts))
            total += (norm.log() - of_target).sum()
            if slope.shape[0]:  # softmax - one-hot, rounded once
                slope.scatter_(1, targets, of_target.exp_().div_(norm).sub_(1.0).to(slope.dtype))
            if hidden_gradient is not None:
                torch.mm(slope, weight, out=hidden_gradient[start:start + several])
            if weight_gradient is not None:
                _add_product(weight_gradient, slope, inputs, rows, first=start == 0)
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
            same = weight_gradient.dtype == ctx.weight_dtype
            out = weight_gradient if same else torch.empty_like(weight_gradient, dtype=ctx.weight_dtype)
            weight_gradient = torch.mul(weight_gradient, scale, out=out)
        return hidden_gradient, weight_gradient, *(None,) * 5


def _softmax_of_chunk(hidden: Tensor, weight: Tensor, target: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """In fp32, (tokens, 1) each: the target's logit less the largest one, and the sum of exp of all of these. Writes
    the softmax to `out` (tokens, V).
    """
    logits = hidden @ weight.T
    largest = logits.amax(1, keepdim=True).float()
    logits = logits.sub_(largest) if logits.dtype == largest.dtype else logits - largest  # widened as it is subtracted
    of_target = logits.gather(1, target)
    norm = logits.exp_().sum(1, keepdim=True)
    if out is not None:
        torch.div(logits, norm, out=out)
    return of_target, norm


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor, rows: int, first: bool) -> None:
    """Adds `slope.T @ hidden` (V, D) to `total` in fp32, `rows` at a time; the `first` product takes its place."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, hidden, beta=0 if first else 1)
        return
    for part, of_part in zip(total.split(rows), slope.split(rows, dim=1)):
        product = of_part.T @ hidden
        part.copy_(product) if first else part.add_(product)
