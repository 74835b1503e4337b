"""A layer's experts: many MLPs, of which a router chooses a few for each token.

    tokens           0        1        2          k = 2 experts of 4 for each, and a weight for each of them
    experts          3, 0     0, 2     3, 2
    rows by expert   0b 1a | | 1b 2b | 0a 2a      `order`: each token k times, the rows of an expert side by side
    products         gate and up, SiLU, times the weight, down: one grouped product over all experts each
    tokens           the k rows of a token are added

No row is dropped, and the host does not ask how many an expert has: an expert may have all or none. (torch's grouped
product on CUDA before Hopper, and ours on the CPU, do.) The router computes in fp32. What it has chosen is kept for
layers that run again in the backward pass: rounding cannot choose otherwise.

Two losses keep experts evenly used, each a mean over the tokens of a sequence, in every layer, added to the cross
entropy of each of the sequence's labels. For T tokens, with p(t, e) the probability of an expert and c(e) the number
of tokens that have chosen it:

    balance      E / (k T) sum over e of c(e) (1 / T) sum over t of p(t, e)     1 if all are used alike
    router z     (1 / T) sum over t of (log of the sum of e^logits)^2           arXiv 2202.08906, section 3.2

A sequence's tokens are on several ranks. Its loss is linear in p, so each rank has the gradients of its own tokens once
it knows c, which the members of a pack add up at the end of their forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from dhp_ray.model.recomputation import once
from dhp_ray.model.segment_attention import kernel_for

NAME = "dhp_experts"


class BalanceLosses(NamedTuple):
    """Coefficients of the two losses."""

    balance: float = 0.0
    router_z: float = 0.0


class Routing:
    """Where one rank's L tokens of a pack go, layer by layer in the forward pass, and the losses of that.

    Args:
        sequence_of: (L,) int64, the place of each token's sequence in the pack; empty if the rank has an idle token.
        sequences: (S, 2) int64, how many tokens and how many labels each sequence of the pack has, on all ranks.
        top_k: experts of a token.
    """

    def __init__(
        self, sequence_of: Tensor, sequences: Tensor, num_experts: int, top_k: int, losses: BalanceLosses
    ) -> None:
        self.sequence_of, self.num_experts, self.top_k, self.losses = sequence_of, num_experts, top_k, losses
        self._tokens, self._labels = sequences[:, :1].float(), sequences[:, 1:]
        self._counts: list[Tensor] = []
        self._gradients: Tensor | None = None

    def add(self, chosen: Tensor) -> int:
        """Count the experts `chosen` (L, k) in the next layer; returns its number."""
        counts = torch.zeros(len(self._tokens), self.num_experts, dtype=torch.int32, device=chosen.device)
        if len(self.sequence_of):
            places = (self.sequence_of[:, None] * self.num_experts + chosen).flatten()
            counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        # without a balance loss one row is enough: of sequences with labels
        self._counts.append(counts if self.losses.balance else (counts * (self._labels > 0)).sum(0, keepdim=True))
        return len(self._counts) - 1

    def share(self, link: PackCommunicator) -> None:
        """Add up what the members of the pack have counted; call it once on all of them, after the forward pass."""
        if not self.losses.balance:
            return
        counts = torch.stack(self._counts)
        total, received = counts.clone(), torch.empty_like(counts)
        for distance in range(1, link.size):  # one after another: counts of many short sequences are large
            link.exchange([(counts, (link.index + distance) % link.size)],
                          [(received, (link.index - distance) % link.size)], Tag.ROUTING).wait()
            total += received
        scale = self.losses.balance * self.num_experts / self.top_k * self._labels / self._tokens.square()
        self._gradients = total * scale

    def probability_gradients(self, layer: int) -> Tensor | None:
        """The gradient of the balance loss with respect to the probabilities (L, E) of a layer's router."""
        if self._gradients is None or not len(self.sequence_of):
            return None
        return self._gradients[layer].index_select(0, self.sequence_of)

    def z_weights(self) -> Tensor | None:
        """The factors of the squares in the router z loss: (L,)."""
        if not self.losses.router_z or not len(self.sequence_of):
            return None
        weights = self.losses.router_z * self._labels / self._tokens
        return weights[:, 0].index_select(0, self.sequence_of)

    def totals(self) -> Tensor:
        """Tokens of this rank at each expert in each layer, (layers, E) int64, of sequences with labels."""
        counts = torch.stack(self._counts)
        return (counts * (self._labels > 0) if self.losses.balance else counts).sum(1)


_routing: ContextVar[Routing | None] = ContextVar("routing of the pack that runs", default=None)


@contextmanager
def counted_by(routing: Routing | None) -> Iterator[None]:
    """Put this around a pack's forward pass whose routers count in `routing`."""
    token = _routing.set(routing)
    try:
        yield
    finally:
        _routing.reset(token)


class Router(Module):
    """Chooses the experts of tokens, with the weight (E, D) of `plain`, a router of transformers."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight, self.top_k = plain.weight, plain.top_k
        self.normalizes = getattr(plain, "norm_topk_prob", True)  # where it is no choice, they do

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (L, E), fp32, the weights (L, k) of the chosen experts, and their numbers (L, k), of `hidden` (L, D).
        """
        logits: Tensor = _Logits.apply(hidden, self.weight)
        routing, layer = _routing.get(), 0

        def choose() -> tuple[Tensor]:
            nonlocal layer
            chosen = logits.detach().topk(self.top_k, dim=-1).indices
            if routing:
                layer = routing.add(chosen)
            return (chosen,)

        (chosen,) = once(choose)
        probabilities: Tensor = _Probabilities.apply(logits, routing, layer)
        weights = probabilities.gather(1, chosen)
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(hidden.dtype), chosen


def use_experts(module: PreTrainedModel, layers: Iterable[Any]) -> None:
    """Let experts in these layers of `module`, if there are any, run as described above."""
    found = [layer for layer in layers if has_experts(layer)]
    for layer in found:
        layer.mlp.gate = Router(layer.mlp.gate)
    if found:
        ExpertsInterface.register(NAME, run_experts)
        module.set_experts_implementation(NAME)


def has_experts(layer: Any) -> bool:
    return hasattr(layer.mlp, "experts")


PARALLEL = "expert_parallel"
"""The attribute of a module of experts that ranks share: what runs in place of `run_experts` (`expert_parallel.py`)."""


ADAPTERS = "adapters"
"""The attribute of a module of experts with adapters (`lora.py`): an `ExpertAdapters`."""


class ExpertAdapters(NamedTuple):
    """`matrices`: by the name of the parameter that they adapt, the modules whose `weight` is A (E, rank, in) and
    B (E, out, rank). An expert's output is W x + scale B A x.
    """

    matrices: Mapping[str, tuple[Module, Module]]
    scale: float


def run_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """(L, D) of tokens `hidden` (L, D) after their experts, `chosen` (L, k), each times its weight (L, k). `experts` is
    the module of transformers, with `gate_up_proj` (E, 2 F, D) and `down_proj` (E, D, F).
    """
    if parallel := getattr(experts, PARALLEL, None):
        shared: Tensor = parallel.run(experts, hidden, chosen, weights)
        return shared
    top_k = chosen.shape[1]
    by_expert, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts.num_experts, device=order.device)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)  # of each expert's rows
    inverse = order.argsort()
    out: Tensor = Sums.apply(
        products(experts, Rows.apply(hidden, order, inverse, top_k, False),
                 weights.flatten().index_select(0, order), ends), order, inverse, top_k, False)
    return out


def products(experts: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """(R, D) of rows (R, D), each after the expert among whose rows it is, times its weight (R,); `ends`: of each
    expert's rows. The weights are multiplied with what goes into the last product, which is narrower than what comes
    out. What goes into a product is freed as soon as autograd does not keep it, if the caller holds no `rows`.
    """
    adapters: ExpertAdapters | None = getattr(experts, ADAPTERS, None)

    def multiplied(x: Tensor, weight: Tensor) -> Tensor:
        # as it is, or by the rows of its matrices. Autograd adds the gradient of the latest view first, so it is freed
        # before that of another weight is there.
        out: Tensor = _Products.apply(x, weight.view(len(ends), -1, weight.shape[-1]), ends)
        return out

    def adapted(x: Tensor, name: str) -> Tensor:
        out = multiplied(x, getattr(experts, name))
        if adapters and name in adapters.matrices:
            first, second = (part.get_parameter("weight") for part in adapters.matrices[name])
            out += multiplied(multiplied(x, first) * adapters.scale, second)
        return out

    both = adapted(rows, "gate_up_proj")
    del rows
    gated = _Gated.apply(both, weights)
    del both
    return adapted(gated, "down_proj")


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
    """hidden (L, D) times weight (E, D), of one type, computed in fp32. For the gradient of the weight it keeps
    `hidden` as it is, which the norm before it keeps too.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden if ctx.needs_input_grad[1] else None, weight)
        return F.linear(hidden.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden = (gradient @ weight.float()).to(weight.dtype) if ctx.needs_input_grad[0] else None
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
        added = ctx.routing.probability_gradients(ctx.layer) if ctx.routing else None
        if added is not None:
            gradient = gradient + added
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


class Rows(torch.autograd.Function):
    """Rows (R, D) of tokens (L, D): row i is token `order[i] // top_k`, and row `inverse[j]` belongs to the choice j of
    top_k L. `spare`: the last row belongs to choices that have none.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int, spare: bool) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k, ctx.spare = top_k, spare
        return tokens.index_select(0, order // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return _sums(gradient, inverse, ctx.top_k, ctx.spare), None, None, None, None


class Sums(torch.autograd.Function):
    """The reverse of `Rows`: adds up the rows (R, D) of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, top_k: int, spare: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return _sums(rows, inverse, top_k, spare)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order // ctx.top_k), None, None, None, None


def _sums(rows: Tensor, inverse: Tensor, top_k: int, spare: bool) -> Tensor:
    """In one order on every device: adding by index has none."""
    if spare:  # most choices have no row
        return F.embedding_bag(inverse.view(-1, top_k), rows, mode="sum", padding_idx=len(rows) - 1)
    return rows.index_select(0, inverse).view(-1, top_k, rows.shape[1]).sum(1)
