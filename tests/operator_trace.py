"""Operators that run, on fake tensors (`memory_trace`): how often each, and the bytes of its inputs and outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {"_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like",
         "empty_strided", "expand", "lift_fresh", "new_empty", "permute", "promote_types", "select", "slice", "split",
         "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
WRITES_FIRST = {"copy_", "fill_", "zero_"}
"""Do not read their first argument."""
FEW_OF_FIRST = {"gather", "scatter_", "scatter_add_"}
"""Touch as much of their first argument as of the others."""
torch.library.define("trace::fused", "(Tensor[] read, int[] like) -> Tensor[]")


class OperatorTrace(TorchDispatchMode):
    """Operators that run under it, and bytes of their inputs and outputs, by name. A number that is read is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.launched, self.moved_bytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, name = function.name().split(".")[0].split("::")
        if name == "_local_scalar_dense":
            return 1.0
        result = function(*arguments, **(options or {}))
        if name not in VIEWS:
            name = namespace if namespace == "c10d" else name
            read = arguments[name in WRITES_FIRST | FEW_OF_FIRST:], {**(options or {}), "out": None}
            written = arguments[-1] if name in FEW_OF_FIRST else result
            self.launched[name] += 1
            self.moved_bytes[name] += sum(min(leaf.numel() * leaf.element_size(), leaf.untyped_storage().nbytes())
                                          for leaf in tree_leaves((read, written)) if isinstance(leaf, Tensor))
        return result


@torch.library.impl("trace::fused", "CompositeExplicitAutograd")
def _fused(read: list[Tensor], like: list[int]) -> list[Tensor]:
    return [torch.empty_like(read[place]) for place in like]


class _Fused(Function):
    """One operator forward and one backward, of shapes alone. `keeps`: the backward pass reads all inputs."""

    @staticmethod
    def forward(ctx: Any, outputs: int, keeps: bool, *inputs: Tensor) -> Any:
        ctx.outputs, ctx.keeps, ctx.others = outputs, keeps, 0 if keeps else len(inputs) - outputs
        ctx.save_for_backward(*(inputs if keeps else inputs[outputs:]))
        found = torch.ops.trace.fused(inputs, [*range(outputs)])
        return tuple(found) if outputs > 1 else found[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        read = [*gradients, *ctx.saved_tensors]
        like = range(1, len(read)) if ctx.keeps else range(ctx.outputs)
        return None, None, *torch.ops.trace.fused(read, [*like]), *[None] * ctx.others


class FusedOperators:
    """Of `dhp_ray.model.fused.Operators`."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return _Fused.apply(1, True, x, weight)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return _Fused.apply(2, False, q, k, cos, sin)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return _Fused.apply(1, True, gate, up)
