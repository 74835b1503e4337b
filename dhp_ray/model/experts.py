"""A layer's experts: many MLPs, of which a router chooses a few for each token.

    tokens           0        1        2          k = 2 experts of 4 for each, and a weight for each of them
    experts          3, 0     0, 2     3, 2
    rows by expert   0b 1a | | 1b 2b | 0a 2a      `order`: each token k times, the rows of an expert side by side
    products         gate and up, SiLU, times the weight, down: one grouped product over all experts each
    tokens           the k rows of a token are added

No row is dropped, and the host never asks how many an expert has: an expert may have all or none. The router computes
in fp32. What it has chosen is kept for layers that run again in the backward pass: rounding cannot choose otherwise.

Two losses keep experts evenly used, each a mean over the tokens of a sequence, in every layer, added to the cross
entropy of each of the sequence's labels. Of T tokens, with p(t, e) the probability of an expert and c(e) how many
tokens have chosen it:

    balance      E / (k T) sum over e of c(e) (1 / T) sum over t of p(t, e)     1 if all are used alike
    router z     (1 / T) sum over t of (log of the sum of e^logits)^2           arXiv 2202.08906, section 3.2

A sequence's tokens are on several ranks. Its loss is linear in p, so each rank has the gradients of its own tokens once
it knows c, which the members of a pack add up at the end of their forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from dhp_ray.comm.pack_communicator import PackCommunicator, Tag
from dhp_ray.model.segment_attention import kernel_for

NAME = "dhp_experts"


class BalanceLosses(NamedTuple):
    """What the two losses are multiplied with."""

    balance: float = 0.0
    router_z: float = 0.0


class Routing:
    """Where one rank's L tokens of a pack go, layer by layer in the forward pass, and the losses of that.

    Args:
        sequence_of: (L,) int64, the place of each token's sequence in the pack; empty if the rank has an idle token.
        sequences: (S, 2) int64, how many tokens and how many labels each sequence of the pack has, on all ranks.
    """

    def __init__(self, sequence_of: Tensor, sequences: Tensor, num_experts: int, losses: BalanceLosses) -> None:
        self.sequence_of, self.num_experts, self.losses = sequence_of, num_experts, losses
        self._labels = sequences[:, 1:]
        self._tokens = sequences[:, :1].float()
        self._counts: list[Tensor] = []
        self._slopes: Tensor | None = None

    def add(self, chosen: Tensor) -> int:
        """Count the experts `chosen` (L, k) in the next layer; returns its number."""
        counts = torch.zeros(len(self._tokens) * self.num_experts, dtype=torch.int32, device=chosen.device)
        if len(self.sequence_of):
            places = (self.sequence_of[:, None] * self.num_experts + chosen).flatten()
            counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        self._counts.append(counts.view(-1, self.num_experts))
        self._top_k = chosen.shape[1]
        return len(self._counts) - 1

    def share(self, link: PackCommunicator) -> None:
        """Add up what the members of the pack have counted; call it once on all of them, after the forward pass."""
        if not self.losses.balance:
            return
        counts = torch.stack(self._counts)
        others = {member: torch.empty_like(counts) for member in range(link.size) if member != link.index}
        link.exchange([(counts, member) for member in others], [(into, member) for member, into in others.items()],
                      Tag.ROUTING).wait()
        total = sum(others.values(), counts)
        scale = self.losses.balance * self.num_experts / self._top_k * self._labels / self._tokens.square()
        self._slopes = total * scale

    def slopes(self, layer: int) -> Tensor | None:
        """The gradient of the balance loss with respect to the probabilities (L, E) of a layer's router."""
        if self._slopes is None or not len(self.sequence_of):
            return None
        return self._slopes[layer].index_select(0, self.sequence_of)

    def z_weights(self) -> Tensor | None:
        """What the squares of the router z loss are multiplied with: (L,)."""
        if not self.losses.router_z or not len(self.sequence_of):
            return None
        weights = self.losses.router_z * self._labels / self._tokens
        return weights[:, 0].index_select(0, self.sequence_of)

    def totals(self) -> Tensor:
        """Tokens of this rank at each expert in each layer, (layers, E) int64, of sequences with labels."""
        learned = self._labels > 0
        return torch.stack([(counts * learned).sum(0) for counts in self._counts])


class Router(Module):
    """Chooses the experts of tokens, with the weight (E, D) of `plain`, a router of transformers.

    normalizes: a token's weights are divided by their sum. `routing`: of the pack that runs, if it is trained on.
    """

    def __init__(self, plain: Any, normalizes: bool) -> None:
        super().__init__()
        self.weight, self.top_k, self.normalizes = plain.weight, plain.top_k, normalizes
        self.routing: Routing | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (L, E), fp32, the weights (L, k) of the chosen experts, and their numbers (L, k), of `hidden` (L, D).
        """
        logits: Tensor = _Logits.apply(hidden, self.weight)
        run, layer = _run.get(), 0
        chosen = run.chosen() if run else None
        if chosen is None:
            chosen = logits.detach().topk(self.top_k, dim=-1).indices
            if run:
                run.keep(chosen)
            if self.routing:
                layer = self.routing.add(chosen)
        probabilities: Tensor = _Probabilities.apply(logits, self.routing, layer)
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
    found = [layer for layer in layers if has_experts(layer)]
    for layer in found:
        layer.mlp.gate = Router(layer.mlp.gate, normalizes)
        layer.register_forward_pre_hook(_take_routing, with_kwargs=True)
    if found:
        ExpertsInterface.register(NAME, run_experts)
        module.set_experts_implementation(NAME)


def _take_routing(layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Give a layer's router the routing of the pack in its `context`; a layer that runs again has that of the last
    forward pass, so a pack's backward pass ends before the next forward pass.
    """
    layer.mlp.gate.routing = named["context"].routing


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


class _Probabilities(torch.autograd.Function):
    """The softmax of logits (L, E), whose backward pass adds the gradients of the balance losses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, routing: Routing | None, layer: int) -> Tensor:
        probabilities = logits.softmax(-1)
        ctx.routing, ctx.layer = routing, layer
        ctx.save_for_backward(probabilities, logits.logsumexp(-1))
        return probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, sums = ctx.saved_tensors
        slopes = ctx.routing.slopes(ctx.layer) if ctx.routing else None
        if slopes is not None:
            gradient = gradient + slopes
        centred = gradient - (gradient * probabilities).sum(-1, keepdim=True)
        weights = ctx.routing.z_weights() if ctx.routing else None
        if weights is not None:
            centred += (2 * weights * sums)[:, None]
        return probabilities * centred, None, None


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
