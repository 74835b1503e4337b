"""flash-linear-attention's gated delta rule by its definition, token by token, behind the signature of fla.yaml."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from tests.contracts.calls import signature_of

TABLE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "fla.yaml").read_text(encoding="utf-8"))


def fla_ops() -> SimpleNamespace:
    """What `import fla.ops.gated_delta_rule` gives, as far as our kernels use it."""
    signature = signature_of(TABLE["signature"])

    def chunk_gated_delta_rule(*positional: Any, **named: Any) -> tuple[Tensor, Tensor]:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        return _rule(**bound.arguments)

    return SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)


def _rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, initial_state: Tensor,
    cu_seqlens: Tensor, chunk_indices: Tensor, **others: Any,
) -> tuple[Tensor, Tensor]:
    """(1, L, H, values) and (sequences, H, keys, values)."""
    assert {name for name, value in others.items() if value} == {"output_final_state", "use_qk_l2norm_in_kernel"}
    assert scale is None
    bounds = cu_seqlens.tolist()
    assert q.shape[:3] == k.shape[:3] == (1, bounds[-1], k.shape[2])
    assert v.shape[:3] == g.shape == beta.shape
    assert initial_state.shape == (len(bounds) - 1, v.shape[2], k.shape[3], v.shape[3])
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert chunk_indices.tolist() == [[number, chunk] for number, size in enumerate(sizes)
                                      for chunk in range(-(-size // TABLE["chunk"]))]
    q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(v.shape[2] // k.shape[2], 2)[0]
            for x in (q, k))
    outputs, states = [], []
    for state, (start, stop) in zip(initial_state, pairwise(bounds)):
        for token in range(start, stop):
            decayed = g[0, token].exp()[:, None, None] * state
            key = k[token][:, :, None]
            error = v[0, token][:, None] - (key * decayed).sum(1, keepdim=True)
            state = decayed + beta[0, token][:, None, None] * key * error
            outputs.append((q[token][:, :, None] * state).sum(1) * k.shape[2] ** -0.5)
        states.append(state)
    return torch.stack(outputs)[None].to(v.dtype), torch.stack(states)
