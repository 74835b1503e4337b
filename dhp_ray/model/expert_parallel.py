"""Experts that E ranks share: what one of them computes for the tokens of all (`comm/expert_group.py`).

    gathered tokens   rank 0's | rank 1's | ..                  (E n, D), n: the most tokens of a rank
    rows              expert 4 | expert 5 | .. | no expert      the choices of this rank's experts, sorted by expert
    products          as in `experts.py`, of those rows
    partial sums      rank 0's | rank 1's | ..                  (E n, D), then scattered

The host does not know how many rows there are, and reads it at no time before a step's totals. Where all experts are
used alike there are n k, and there is room for CAPACITY times as many. If more come on any rank, none is dropped: what
the ranks have computed is thrown away before the update, and the packs run again with more room (`needs_more_room`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module
from torch.nn import functional as F

from dhp_ray.comm.expert_group import ExpertGroup
from dhp_ray.comm.ranks import numbers_of_ranks
from dhp_ray.model.experts import PARALLEL, Rows, Sums, products
from dhp_ray.planner.memory.experts import CAPACITY, CAPACITY_ROWS
from dhp_ray.planner.memory.model_shape import ModelShape


class ExpertParallel:
    """The part that one rank has of the experts of a model of this shape, of all its layers."""

    def __init__(self, group: ExpertGroup, shape: ModelShape) -> None:
        self.group, self.num_experts, self.top_k = group, shape.experts, shape.experts_per_token
        self.own = shape.experts // group.size
        self.capacity = CAPACITY
        self._most = torch.zeros((), device=group.progress.device)  # the capacity that would have been enough

    def share(self, modules: Iterable[Module]) -> None:
        """Keep only this rank's part of these experts' parameters, which are by the rows of their matrices."""
        for experts in modules:
            setattr(experts, PARALLEL, self)
            for parameter in experts.parameters():
                parameter.data = parameter.data.chunk(self.group.size)[self.group.index]

    def release(self, modules: Iterable[Module]) -> None:
        """Drop all references to the groups; these experts cannot run afterwards."""
        for experts in modules:
            delattr(experts, PARALLEL)
        self.group.release()

    @property
    def room(self) -> int:
        """The most rows of a layer."""
        num_tokens = self.group.num_tokens
        return min(math.ceil(self.capacity * num_tokens * self.top_k) + CAPACITY_ROWS,
                   self.group.size * num_tokens * min(self.top_k, self.own))

    def needs_more_room(self, world: dist.ProcessGroup | None) -> bool:
        """Whether more rows came on any rank, since the last call, than there was room for. From now on there is room
        for as many and a quarter more (rows that were left out change what later layers choose), at least CAPACITY.
        Every rank calls this, and waits here for its device.
        """
        most, had = max(numbers_of_ranks(self._most, world, self.group.progress)), self.capacity
        self._most.zero_()
        self.capacity = max(CAPACITY, 1.25 * most)
        return most * (1 + 1e-6) > had  # the fp32 quotient of many rows is not exact

    def run(self, experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As `run_experts` in `experts.py`; every rank of the group calls this, forward and backward."""
        tokens, weights_of_all = _Gather.apply(self.group, hidden, weights)
        choices = self.group.gather(chosen.int(), padding=self.num_experts).flatten() - self.group.index * self.own
        choices.masked_fill_((choices < 0) | (choices > self.own), self.own)  # which is the expert of others
        by_expert, order = choices.sort(stable=True)
        numbers = torch.arange(self.own, dtype=by_expert.dtype, device=order.device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        room = self.room
        torch.maximum(self._most, (ends[-1] - CAPACITY_ROWS) / (self.group.num_tokens * self.top_k), out=self._most)
        ends = ends.clamp(max=room)
        inverse = order.argsort()
        inverse.masked_fill_(inverse >= ends[-1], room)  # row `room` is added to no token
        order = F.pad(order[:room], (0, 1))
        # behind the last expert's rows, products leave memory as it is: neither sums nor gradients may come of it
        is_none = torch.arange(room + 1, device=order.device) >= ends[-1]
        row_weights = weights_of_all.flatten().index_select(0, order).masked_fill(is_none, 0)
        rows = [Rows.apply(tokens, order, inverse, self.top_k, True)]
        del tokens  # as large as the group has ranks
        partial = Sums.apply(products(experts, rows.pop(), row_weights, ends), order, inverse, self.top_k, True)
        summed: Tensor = _Scatter.apply(self.group, partial, len(hidden))
        return summed


class _Gather(torch.autograd.Function):
    """Tokens (L, D) and weights (L, k) of all ranks of a group: (E n, D) and (E n, k)."""

    @staticmethod
    def forward(ctx: Any, group: ExpertGroup, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.num_tokens = group, len(tokens)
        return group.gather(tokens), group.gather(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(ctx.group.scatter(gradient, ctx.num_tokens) for gradient in gradients)


class _Scatter(torch.autograd.Function):
    """The sums (L, D) of what a group's ranks have for this rank's tokens, from `partial` (E n, D) of each."""

    @staticmethod
    def forward(ctx: Any, group: ExpertGroup, partial: Tensor, num_tokens: int) -> Tensor:
        ctx.group = group
        return group.scatter(partial, num_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.group.gather(gradient), None
