"""A layer's experts: many MLPs, of which a router chooses a few for each token.

    tokens           0        1        2          k = 2 experts of 4 for each, and a weight for each of them
    experts          3, 0     0, 2     3, 2
    rows by expert   0b 1a | | 1b 2b | 0a 2a      `order`: each token k times, the rows of an expert side by side
    products         gate and up, SiLU, times the weight, down: one grouped product over all experts each
    tokens           the k rows of a token are added

No row is dropped, and the host never asks how many an expert has: an expert may have all or none. The router computes
in fp32. What it has chosen is kept for layers that run again in the backward pass: rounding cannot choose otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dhp_ray.model.segment_attention import kernel_for

NAME = "dhp_experts"


class Router(Module):
    """Chooses the experts of tokens, with the weight (E, D) of `plain`, a router of transformers.

    normalizes: a token's weights are divided by their sum.
    """

    def __init__(self, plain: Any, normalizes: bool) -> None:
        super().__init__()
        self.weight, self.top_k, self.normalizes = plain.weight, plain.top_k, normalizes

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (L, E), fp32, the weights (L, k) of the chosen experts, and their numbers (L, k), of `hidden` (L, D).
        """
        logits: Tensor = _Logits.apply(hidden, self.weight)
        probabilities, run = logits.softmax(-1), _run.get()
        chosen = run.chosen() if run else None
        if chosen is None:
            chosen = probabilities.detach().topk(self.top_k, dim=-1).indices
            if run:
                run.keep(chosen)
        weights = probabilities.gather(1, chosen)
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(hidden.dtype), chosen


class _Run(AbstractContextManager["_Run"]):
    """A run of a layer: its first, whose choice is kept in `kept`, or its second in the backward pass."""

    def __init__(self, kept: list[Tensor], is_second: bool) -> None:
        self._kept, self._is_second = kept, is_second

    def __enter__(self) -> _Run:
        self._token = _run.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _run.reset(self._token)

    def chosen(self) -> Tensor | None:
        return self._kept[0] if self._is_second else None

    def keep(self, chosen: Tensor) -> None:
        self._kept.append(chosen)


_run: ContextVar[_Run | None] = ContextVar("run of a layer", default=None)


def both_runs() -> tuple[_Run, _Run]:
    """The contexts of a layer's forward pass and of its second run, as torch's checkpoint asks for them."""
    kept: list[Tensor] = []
    return _Run(kept, is_second=False), _Run(kept, is_second=True)


def use_experts(module: PreTrainedModel, layers: Iterable[Any], normalizes: bool) -> None:
    """Let experts in these layers of `module`, if there are any, run as described above."""
    mlps = [layer.mlp for layer in layers if has_experts(layer)]
    for mlp in mlps:
        mlp.gate = Router(mlp.gate, normalizes)
    if mlps:
        ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
        module.set_experts_implementation(NAME)


def has_experts(layer: Any) -> bool:
    return hasattr(layer.mlp, "experts")


def run_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """(L, D) of tokens `hidden` (L, D) after their experts, `chosen` (L, k), each times its weight (L, k). `experts` is
    the module of transformers, with `gate_up_proj` (E, 2 F, D) and `down_proj` (E, D, F).

    The weights are multiplied with what goes into the last product, which is narrower than what comes out.
    """
    by_expert, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts.num_experts, device=order.device)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)  # of each expert's rows
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows: Tensor = _Rows.apply(hidden, order, back)
    into, out_of = (weight.view(len(numbers), -1, weight.shape[-1])  # as they are, or by the rows of their matrices
                    for weight in (experts.gate_up_proj, experts.down_proj))
    inner = _Gated.apply(_Products.apply(rows, into, ends), weights.flatten().index_select(0, order))
    out: Tensor = _Sums.apply(_Products.apply(inner, out_of, ends), order, back, len(hidden))
    return out


class _Products(torch.autograd.Function):
    """Each row of x (R, in) times the matrix of its group, of weight (E, out, in) transposed: (R, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)
        return kernel_for(x.device).grouped_products(x, weight.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        kernel = kernel_for(gradient.device)
        of_x = kernel.grouped_products(gradient, weight, ends) if ctx.needs_input_grad[0] else None
        of_weight = kernel.grouped_sums(gradient, x, ends) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


class _Logits(torch.autograd.Function):
    """hidden (L, D) times weight (E, D), computed in fp32. It keeps `hidden` as it is, which is kept anyway."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden = (gradient @ weight.float()).to(hidden.dtype) if ctx.needs_input_grad[0] else None
        of_weight = (gradient.t() @ hidden.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight


class _Gated(torch.autograd.Function):
    """silu(gate) * up * weight of rows (R, 2 F), gate and up side by side, and weights (R,): (R, F). It keeps its
    inputs alone.
    """

    @staticmethod
    def forward(ctx: Any, both: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(both, weights)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(weights[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        both, weights = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        of_both = torch.empty_like(both)
        of_gate, of_up = of_both.chunk(2, dim=-1)
        activated = F.silu(gate)
        of_weights = (gradient * activated * up).sum(-1)
        gradient = gradient * weights[:, None]
        torch.mul(gradient, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient.mul_(up), gate, grad_input=of_gate)
        return of_both, of_weights


class _Rows(torch.autograd.Function):
    """Rows (k L, D) of tokens (L, D): row i is token `order[i] // k`, and row `back[j]` belongs to the choice j."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.num_tokens = len(tokens)
        return _rows(tokens, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, back = ctx.saved_tensors
        return _sums(gradient, back, ctx.num_tokens), None, None


class _Sums(torch.autograd.Function):
    """The reverse of `_Rows`: adds up the rows (k L, D) of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_tokens = num_tokens
        return _sums(rows, back, num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _rows(gradient, order), None, None, None


def _rows(tokens: Tensor, order: Tensor) -> Tensor:
    return tokens.index_select(0, order // (len(order) // len(tokens)))


def _sums(rows: Tensor, back: Tensor, num_tokens: int) -> Tensor:
    """In one order on every device: adding by index has none."""
    return rows.index_select(0, back).view(num_tokens, -1, rows.shape[1]).sum(1)
