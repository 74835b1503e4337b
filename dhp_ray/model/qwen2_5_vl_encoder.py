"""Qwen2.5-VL's vision encoder over our kernels: windows and images are segments of one sequence of patches.

    patches, window by window    w0 w0 w0 | w1 w1 | w2 w2 w2 || w3 w3 w3 | w4 w4      window_index brings them there
    most blocks attend within    a window   `cu_window_seqlens`
    `fullatt_block_indexes`      an image, or a step in time of a video   `cu_seqlens`

transformers would cut queries, keys and values apart at offsets that it reads from the device, and call attention once
a window: its registry of attention functions comes after that. So the block's attention is a subclass of its own. So is
the embedding of patches: transformers has a convolution there, which fails in bf16 on NPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionPatchEmbed,
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
)
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from dhp_ray.model.adapter import EncoderArguments
from dhp_ray.model.fused import Operators
from dhp_ray.model.kernels import Segments
from dhp_ray.model.segment_attention import segment_attention


class PatchEmbedding(Qwen2_5_VisionPatchEmbed):
    """The embedding of patches, with the weight of `plain`: its convolution's stride is its kernel, so each patch is
    multiplied with one matrix.
    """

    def __init__(self, plain: Qwen2_5_VisionPatchEmbed) -> None:
        with torch.device("meta"):
            super().__init__(plain.patch_size, plain.temporal_patch_size, plain.in_channels, plain.embed_dim)
        self.proj = plain.proj
        self.train(plain.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(P, width) of patches `hidden_states` (P, channels x frames x height x width)."""
        weight = self.proj.weight.flatten(1)
        return F.linear(hidden_states.to(weight.dtype), weight)


class VisionAttention(Qwen2_5_VLVisionAttention):
    """A vision block's attention, with the weights of `plain`."""

    def __init__(self, plain: Qwen2_5_VLVisionAttention) -> None:
        with torch.device("meta"):
            super().__init__(plain.config)
        self.qkv, self.proj = plain.qkv, plain.proj
        self.operators: Operators | None = None
        self.train(plain.training)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        cu_seqlens: Segments,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: int | None = None,
        **_: Any,
    ) -> Tensor:
        """(P, width) of patches `hidden_states` (P, width); `cu_seqlens` are the segments that attend to themselves."""
        q, k, v = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1).unbind(1)
        if self.operators is None:
            q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        else:
            q, k = self._rotated(self.operators, q, k, *position_embeddings)
        return self.proj(segment_attention(q, k, v, cu_seqlens, self.scaling).flatten(1))

    def _rotated(
        self, operators: Operators, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys (P, H, D) rotated in fp32, as transformers does."""
        wide_q, wide_k = (x.float().transpose(0, 1)[None] for x in (q, k))
        rotated = operators.rotary(wide_q, wide_k, cos.float()[None], sin.float()[None])
        q, k = (new[0].transpose(0, 1).to(old.dtype) for new, old in zip(rotated, (q, k)))
        return q, k


def encoder_arguments(grids: Sequence[Sequence[int]], config: Any) -> EncoderArguments:
    """What the encoder takes from the sizes of its images alone, by the names of its arguments; on the CPU.

    `grids`: patches of each image in time, height and width; one image at least. `config` is the encoder's own.
    """
    sizes = torch.tensor(grids)
    window_index, window_offsets = get_vision_window_index(sizes, config.spatial_merge_size, config.window_size,
                                                           config.patch_size)
    return {"position_ids": get_vision_position_ids(sizes, config.spatial_merge_size),
            "cu_seqlens": Segments.between(get_vision_cu_seqlens(sizes).tolist()),
            "window_index": window_index, "cu_window_seqlens": Segments.between(window_offsets.tolist())}
