"""CUDA: Liger's fused norm, rotation and SwiGLU (Triton), where the extra `liger` is installed.

Written against liger-kernel 0.8 (tests/contracts/liger.yaml); tests/model/test_fused.py compares them on a device.
"""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    # "llama": normalised in fp32, scaled in the type of x, as transformers does. Not in place: that would write over
    # the gradient of the output, which may be another's too.
    normed: Tensor = LigerRMSNormFunction.apply(x, weight, epsilon, 0.0, "llama", False)
    return normed


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import LigerRopeFunction

    # it writes over q and k where their heads lie side by side, as a projection leaves them: no backward reads them
    rotated: tuple[Tensor, Tensor] = LigerRopeFunction.apply(q, k, cos, sin)
    return rotated


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    product: Tensor = LigerSiLUMulFunction.apply(gate, up)
    return product
