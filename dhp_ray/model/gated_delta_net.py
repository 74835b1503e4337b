"""A layer's gated delta net (arXiv 2412.06464) over the members of a pack: projections, a short convolution along each
sequence, the gated delta rule, and a gated norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from dhp_ray.comm.pack_communicator import exchange_rows
from dhp_ray.model.attention import PackContext
from dhp_ray.model.delta_rule import gated_delta_rule
from dhp_ray.model.pieces import Pieces


class GatedDeltaNet(Module):
    """Computes what `plain`, that of transformers, does for whole sequences, with its parameters."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = (
            plain.in_proj_qkv, plain.in_proj_z, plain.in_proj_b, plain.in_proj_a)
        self.conv1d, self.norm, self.out_proj = plain.conv1d, plain.norm, plain.out_proj
        self.A_log, self.dt_bias = plain.A_log, plain.dt_bias
        self.widths = (plain.key_dim, plain.key_dim, plain.value_dim)
        self.head_widths = (plain.head_k_dim, plain.head_k_dim, plain.head_v_dim)

    def forward(self, hidden_states: Tensor, *, context: PackContext, **_: Any) -> Tensor:
        """(1, L, D) for this member's tokens `hidden_states` (1, L, D) of the pack `context`, which has pieces."""
        if context.pieces is None:
            raise ValueError("gated delta net: the model was called with a context without pieces=pieces_of(...)")
        context.move(hidden_states.device)
        hidden = hidden_states.squeeze(0)  # not [0], whose backward pass copies
        mixed = F.silu(self._convolved(self.in_proj_qkv(hidden), context, context.pieces))
        q, k, v = (rows.unflatten(1, (-1, width)) for rows, width in zip(mixed.split(self.widths, 1), self.head_widths))
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(hidden).float() + self.dt_bias)
        out = gated_delta_rule(q, k, v, decay, self.in_proj_b(hidden).sigmoid(), context.pieces, context.link,
                               context.differentiable)
        gate = self.in_proj_z(hidden).unflatten(1, (-1, self.head_widths[2]))
        return self.out_proj(self.norm(out, gate).flatten(1))[None]  # type: ignore[no-any-return]

    def _convolved(self, rows: Tensor, context: PackContext, pieces: Pieces) -> Tensor:
        """Each channel of `rows` (L, C), along the sequences, which are of zeros before their first token."""
        parts = [rows.new_zeros(1, rows.shape[1]), rows]
        if pieces.exchanges_rows:
            assert context.link is not None
            parts.append(exchange_rows(rows, pieces.send_rows, pieces.receive_counts, context.link,
                                       differentiable=context.differentiable))
        windows = torch.cat(parts).index_select(0, pieces.conv_rows)
        convolved = F.conv1d(windows.t()[None], self.conv1d.weight, groups=rows.shape[1]).squeeze(0).t()
        return convolved.index_select(0, pieces.conv_places)
