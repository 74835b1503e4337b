"""Liger's fused operators in plain torch, behind the signatures of liger.yaml. They compute in fp32 what Liger's
do, and write over queries and keys that lie as projections leave them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from tests.contracts.calls import signature_of

TABLE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "liger.yaml").read_text(encoding="utf-8"))


def liger_ops() -> SimpleNamespace:
    """What `import liger_kernel.ops` gives, as far as our kernels use it."""
    ours: dict[str, Callable[..., Any]] = {"LigerRMSNormFunction": _rms_norm, "LigerRopeFunction": _Rope.apply,
                                           "LigerSiLUMulFunction": _silu_mul}
    return SimpleNamespace(**{name: SimpleNamespace(apply=_checked(name, ours[name])) for name in TABLE})


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = signature_of(TABLE[name]["signature"])

    def apply(*arguments: Any) -> Any:  # as of a torch.autograd.Function: by position alone
        signature.bind(*arguments)
        return function(*arguments)

    return apply


def _rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    assert (offset, casting_mode, in_place) == (0.0, "llama", False)
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        assert cos.shape == sin.shape == (1, q.shape[2], q.shape[3])
        ctx.save_for_backward(cos, sin)
        return _over(q, cos, sin), _over(k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *(_over(gradient, cos, -sin) for gradient in gradients), None, None


def _over(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated, in the memory of x where it is contiguous as (1, L, H, D)."""
    rows = x.detach().transpose(1, 2).contiguous()
    first, second = rows.chunk(2, -1)
    rows.copy_(rows * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None])
    return rows.transpose(1, 2)
