"""Parts of the vision encoders of Qwen, over our kernels.

transformers would cut queries, keys and values apart at offsets that it reads from the device, and call attention once
an image or window: its registry of attention functions comes after that. And it embeds patches by a convolution, which
fails in bf16 on NPUs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from dhp_ray.model.fused import Operators
from dhp_ray.model.kernels import Segments
from dhp_ray.model.segment_attention import segment_attention


class PatchEmbedding(Module):
    """The embedding of patches, with the weight of `plain`: its convolution's stride is its kernel, so each patch is
    multiplied with one matrix.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.proj = plain.proj
        self.train(plain.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(P, width) of patches `hidden_states` (P, channels x frames x height x width)."""
        weight = self.proj.weight.flatten(1)
        return F.linear(hidden_states.to(weight.dtype), weight, self.proj.bias)


class VisionAttention(Module):
    """A vision block's attention, with the weights of `plain`."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads, self.scaling = plain.qkv, plain.proj, plain.num_heads, plain.scaling
        self.operators: Operators | None = None
        self.train(plain.training)

    def forward(
        self, hidden_states: Tensor, *, cu_seqlens: Segments, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        """(P, width) of patches `hidden_states` (P, width); `cu_seqlens` are the segments that attend to themselves."""
        q, k, v = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1).unbind(1)
        if self.operators is None:
            q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        else:
            q, k = self._rotated(self.operators, q, k, *position_embeddings)
        out: Tensor = self.proj(segment_attention(q, k, v, cu_seqlens, self.scaling).flatten(1))
        return out

    def _rotated(
        self, operators: Operators, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys (P, H, D) rotated in fp32, as transformers does."""
        wide_q, wide_k = (x.float().transpose(0, 1)[None] for x in (q, k))
        rotated = operators.rotary(wide_q, wide_k, cos.float()[None], sin.float()[None])
        q, k = (new[0].transpose(0, 1).to(old.dtype) for new, old in zip(rotated, (q, k)))
        return q, k
