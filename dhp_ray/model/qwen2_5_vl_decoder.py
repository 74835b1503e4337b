"""The attention of Qwen2.5-VL's language model with a fused rotation: transformers calls its own function for that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLAttention

from dhp_ray.model.attention import PackContext, attention_of_layer
from dhp_ray.model.fused import Operators


class LanguageAttention(Qwen2_5_VLAttention):
    """A layer's attention, with the weights of `plain`."""

    def __init__(self, plain: Qwen2_5_VLAttention, operators: Operators) -> None:
        with torch.device("meta"):
            super().__init__(plain.config, plain.layer_idx)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = plain.q_proj, plain.k_proj, plain.v_proj, plain.o_proj
        self.operators = operators
        self.train(plain.training)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        context: PackContext | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """(1, L, D) of this member's tokens `hidden_states` (1, L, D) of the pack `context`."""
        assert position_embeddings is not None
        assert context is not None
        num_tokens = hidden_states.shape[1]
        q, k, v = (project(hidden_states).view(1, num_tokens, -1, self.head_dim).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.operators.rotary(q, k, *position_embeddings)
        out = attention_of_layer(q, k, v, self.scaling, context)
        return self.o_proj(out.reshape(1, num_tokens, -1)), None
