"""Norms, rotary embeddings and SwiGLU with the fused operators of a device, as modules that replace those of
transformers and take over their parameters under the same names.

The hooks in transformers cover only RMS norms and the language model's rotary embedding, and use the package `kernels`,
which downloads code from the Hub.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Identity, Module

from dhp_ray.model.attention import PackContext, attention_of_layer
from dhp_ray.model.experts import has_experts
from dhp_ray.model.kernels import cuda, npu
from dhp_ray.planner.memory.model_shape import LayerShape


class Operators(Protocol):
    """The fused operators of a kind of device, with their backward passes: a module of `dhp_ray.model.kernels`."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Divide x (..., D) by the root of its mean square and multiply by `weight` (D,)."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q (1, H, L, D) and k (1, Hk, L, D), half by half, with `cos` and `sin` (1, L, D) of the same type. May
        overwrite q and k.
        """

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, all (..., F)."""


def operators_of(device: str) -> Operators | None:
    """The fused operators of a kind of device; None if it has none. CUDA has them if Liger is installed."""
    if device == "npu":
        return npu
    return cuda if device == "cuda" and find_spec("liger_kernel") else None


def unfused_notice(device: str) -> str:
    """What to tell the user of a kind of device in one line; empty if it has fused operators, or never has."""
    return "" if device == "cpu" or operators_of(device) else (
        "Liger is not installed on the workers (pip install -e '.[cuda]'): norms, rotary embeddings and SwiGLU are "
        "not fused; on an H200 a step then took 1.2 times as long")


def unfused_states_notice(device: str, layers: Iterable[LayerShape]) -> str:
    """The same of layers with gated delta nets, of a model that has some."""
    if device != "cuda" or not any(layer.state_heads for layer in layers) or cuda.has_gated_delta_rule():
        return ""
    return ("flash-linear-attention does not run on the workers (pip install -e '.[cuda]'; torch 2.13, A100 to H200): "
            "gated delta nets are computed by operators of torch, chunk after chunk")


class FusedNorm(Module):
    """An RMS norm with the weight of `plain`, a norm of transformers."""

    def __init__(self, plain: Any, operators: Operators) -> None:
        super().__init__()
        self.weight, self.epsilon, self.operators = plain.weight, plain.variance_epsilon, operators

    def forward(self, hidden: Tensor) -> Tensor:
        return self.operators.rms_norm(hidden, self.weight, self.epsilon)


class FusedMLP(Module):
    """A gated MLP with the projections of `plain`, an MLP of transformers."""

    def __init__(self, plain: Any, operators: Operators) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = plain.gate_proj, plain.up_proj, plain.down_proj
        self.operators = operators

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.operators.swiglu(self.gate_proj(hidden), self.up_proj(hidden)))


class FusedAttention(Module):
    """The attention of a language model layer, with the weights of `plain` and a fused rotary embedding."""

    def __init__(self, plain: Any, operators: Operators) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = plain.q_proj, plain.k_proj, plain.v_proj, plain.o_proj
        self.q_norm, self.k_norm = (FusedNorm(getattr(plain, name), operators) if hasattr(plain, name) else Identity()
                                    for name in ("q_norm", "k_norm"))
        self.head_dim, self.scaling, self.operators = plain.head_dim, plain.scaling, operators
        self.in_window = getattr(plain, "sliding_window", None) is not None

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], context: PackContext, **_: Any
    ) -> tuple[Tensor, None]:
        """Return (1, L, D) for this member's tokens `hidden_states` (1, L, D) of the pack `context`."""
        num_tokens = hidden_states.shape[1]
        q, k, v = (project(hidden_states).view(1, num_tokens, -1, self.head_dim)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        q, k = self.operators.rotary(q, k, *position_embeddings)
        out = attention_of_layer(q, k, v.transpose(1, 2), self.scaling, context, self.in_window)
        return self.o_proj(out.reshape(1, num_tokens, -1)), None


def fuse(owner: Module, operators: Operators, norms: Sequence[str], activation: str = "") -> None:
    """Replace `owner`'s norms and, if its activation is silu, its `mlp` with fused modules; experts stay as they are.
    """
    for name in norms:
        setattr(owner, name, FusedNorm(getattr(owner, name), operators))
    if activation == "silu" and not has_experts(owner):
        owner.mlp = FusedMLP(owner.mlp, operators)
