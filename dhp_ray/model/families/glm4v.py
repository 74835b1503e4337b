"""GLM-4.1V (arXiv 2507.01006) and GLM-4.6V-Flash: M-RoPE positions, an encoder that interpolates between learned
positions, and four norms in each layer of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Glm4vConfig, Glm4vForConditionalGeneration, PreTrainedConfig, PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from dhp_ray.model.families.qwen2_5_vl import PatchEmbedding, Qwen25VL, VisionAttention
from dhp_ray.model.families.qwen3_vl import Qwen3Vision
from dhp_ray.model.files import ModelError
from dhp_ray.model.fused import Operators, fuse
from dhp_ray.model.language_model import EncoderArguments
from dhp_ray.model.segment_attention import Segments
from dhp_ray.model.vision_language_model import VisionLanguageModel
from dhp_ray.planner.memory.model_shape import LayerShape


class Glm4v(Qwen25VL):
    """`VisionLanguageModel` of GLM-4.1V. A step in time of a video is written as an image, with its time behind it."""

    model_class: ClassVar[type[PreTrainedModel]] = Glm4vForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = Glm4vConfig
    stored_names = ()

    vision_runs = VisionLanguageModel.vision_runs
    position_runs = staticmethod(Qwen3Vision.position_runs)

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__(module)
        self.vision_token_ids = (self.vision_token_ids[0],) * 2

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.vision_config.attention_dropout:
            raise ModelError(f"model: attention_dropout of the encoder is {config.vision_config.attention_dropout}; "
                             "allowed: 0")

    def replace_modules(self) -> None:
        self.module.model.visual = Encoder(self.visual)  # type: ignore[union-attr]

    def arguments_of(self, grids: Tensor) -> EncoderArguments:
        merge, side = self.module.config.vision_config.spatial_merge_size, self.visual.embeddings.side
        rows, weights = get_vision_interpolation_indices_and_weights(
            grids, num_grid_per_side=side, mode="bicubic", spatial_merge_size=merge)
        # the weights of a patch's 4 x 4 neighbours are products, and those of an axis add up to 1
        down, across = (torch.zeros(len(rows), side).scatter_add(1, places, weights)
                        for places in (rows // side, rows % side))
        return {"position_ids": get_vision_position_ids(grids, merge), "down": down, "across": across,
                "segments": Segments.between(get_vision_cu_seqlens(grids).tolist())}

    def features(self, pixels: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        features: Tensor = self.visual(pixels, **arguments)
        return features

    def fuse_encoder(self, operators: Operators) -> None:
        for block in self.visual.blocks:
            fuse(block, operators, ("norm1", "norm2"), self.module.config.vision_config.hidden_act)
            block.attn.operators = operators
        fuse(self.visual, operators, ("post_conv_layernorm", "post_layernorm"))

    def fuse_language(self, operators: Operators) -> None:
        """The norms alone: the MLP has one product for both of its inputs, attention rotates neighbouring numbers."""
        for layer in self.language.layers:
            fuse(layer, operators, ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
                                    "post_mlp_layernorm"))
        fuse(self.language, operators, ("norm",))

    def mixer_shape(self, text: Any, layer: Any) -> dict[str, Any]:
        return {**super().mixer_shape(text, layer), "norms": 4}

    def vision_shape(self, config: Any) -> dict[str, Any]:
        """Of a token its merger keeps two products of the features' width with their norm and activation, and an MLP.
        """
        vision = config.vision_config
        return {**super().vision_shape(config), "position_rows": self.visual.embeddings.side**2, "vision_norms": 2,
                "merger_width": 2 * (vision.out_hidden_size + vision.intermediate_size)}

    def kinds_of_blocks(self, vision: Any, blocks: LayerShape) -> tuple[LayerShape, ...]:
        return (replace(blocks, mlp_width=vision.out_hidden_size),)


class Encoder(Module):
    """The encoder with the modules of `plain`. Its own forward pass would find out on the device, with as many numbers
    as images times patches, to which image a patch belongs.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.patch_embed, self.post_conv_layernorm = PatchEmbedding(plain.patch_embed), plain.post_conv_layernorm
        self.embeddings, self.rotary_pos_emb = PositionEmbedding(plain.embeddings), plain.rotary_pos_emb
        self.blocks, self.post_layernorm = plain.blocks, plain.post_layernorm
        self.downsample, self.merger = Downsample(plain.downsample), plain.merger
        for block in self.blocks:
            block.attn = VisionAttention(block.attn)

    def forward(
        self, pixels: Tensor, position_ids: Tensor, down: Tensor, across: Tensor, segments: Segments
    ) -> Tensor:
        """Features (V, F) of patches `pixels` (P, patch_dim) at `position_ids` (P, 2), which attend to those of their
        segment. `down` and `across`: as of `PositionEmbedding`.
        """
        hidden = self.post_conv_layernorm(self.patch_embed(pixels))
        rotations = self.rotary_pos_emb(hidden, position_ids)
        hidden = hidden + self.embeddings(down, across)
        for block in self.blocks:
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotations)
        features: Tensor = self.merger(self.downsample(self.post_layernorm(hidden)))
        return features


class PositionEmbedding(Module):
    """Learned positions with the table (side x side, width) of `plain`. One product with all of them interpolates: rows
    need not be gathered for each patch, nor their gradients be added in any order.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.position_embedding, self.side = plain.position_embedding, plain.image_size // plain.patch_size

    def forward(self, down: Tensor, across: Tensor) -> Tensor:
        """(P, width): the sum over the table with the weights of its rows, `down`, and columns, `across`, both fp32
        (P, side).
        """
        # the weights of all rows are computed again: of a patch they are as many as the table has rows
        mean: Tensor = checkpoint(self._mean, down, across, use_reentrant=False, preserve_rng_state=False)
        return mean

    def _mean(self, down: Tensor, across: Tensor) -> Tensor:
        table = self.position_embedding.weight
        weights = (down[:, :, None] * across[:, None]).flatten(1)
        return (weights @ table.float()).to(table.dtype)


class Downsample(Module):
    """The convolution `plain` as one product, as in `PatchEmbedding`."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """(P / m^2, F) of P patches `hidden` (P, width), of which m x m neighbours make a token."""
        area = self.weight.shape[2] * self.weight.shape[3]
        tokens = hidden.view(-1, area, hidden.shape[-1]).transpose(1, 2).flatten(1)
        return F.linear(tokens, self.weight.flatten(1), self.bias)
