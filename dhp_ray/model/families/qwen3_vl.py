"""Qwen3-VL (arXiv 2511.21631), dense and with experts: features of several levels, a time stamp before each step in
time of a video.

A vision feature is a row of 1 + n parts of the language model's width: what the encoder's last block gives, and what
blocks `deepstack_visual_indexes` give (DeepStack, arXiv 2406.04334). The first part is the token's embedding; part i is
added to its hidden state behind layer i. All travel as one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from dhp_ray.model.families.qwen2_5_vl import Qwen25VL
from dhp_ray.model.files import ModelError
from dhp_ray.model.fused import Operators
from dhp_ray.model.segment_attention import Segments
from dhp_ray.model.vision_language_model import EncoderArguments, VisionLanguageModel
from dhp_ray.planner.memory.model_shape import LayerShape


class Qwen3Vision(Qwen25VL):
    """What Qwen3-VL and Qwen3.5 share: an encoder with learned positions, and time stamps between the steps of a video.
    """

    stored_names = ()

    vision_runs = VisionLanguageModel.vision_runs

    @staticmethod
    def position_runs(config: Any, grid: Sequence[int], seconds: float) -> list[tuple[Sequence[int], float]]:
        """A step in time of a video is like an image: its time stamp tells the time."""
        time, height, width = grid
        return [((1, height, width), 0.0)] * time if seconds else [(grid, 1.0)]

    def arguments_of(self, grids: Tensor) -> EncoderArguments:
        merge = self.visual.spatial_merge_size
        rows, weights = get_vision_interpolation_indices_and_weights(
            grids, num_grid_per_side=self.visual.num_grid_per_side, mode=self.visual.interpolation_mode,
            align_corners=self.visual.interpolation_align_corners, spatial_merge_size=merge)
        return {"position_ids": get_vision_position_ids(grids, merge), "interp_indices": rows,
                "interp_weights": weights, "cu_seqlens": Segments.between(get_vision_cu_seqlens(grids).tolist())}

    def fuse_encoder(self, operators: Operators) -> None:
        """Its norms are layer norms and its MLPs have no gate: what is fused are rotations."""
        for block in self.visual.blocks:
            block.attn.operators = operators

    def vision_shape(self, config: Any) -> dict[str, Any]:
        return {**super().vision_shape(config), "position_rows": config.vision_config.num_position_embeddings}

    def kinds_of_blocks(self, vision: Any, blocks: LayerShape) -> tuple[LayerShape, ...]:
        return (replace(blocks, gated=False, layer_norms=True),)


class Qwen3VL(Qwen3Vision):
    """`VisionLanguageModel` of Qwen3-VL."""

    model_class: ClassVar[type[PreTrainedModel]] = Qwen3VLForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = Qwen3VLConfig

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        levels, depth = list(config.vision_config.deepstack_visual_indexes), config.vision_config.depth
        if len(set(levels) & set(range(depth))) != len(levels) or len(levels) > config.text_config.num_hidden_layers:
            raise ModelError(f"model: deepstack_visual_indexes are {levels}; allowed: different ones of {depth} "
                             f"blocks, as many as the language model's {config.text_config.num_hidden_layers} layers "
                             "at most")

    def replace_modules(self) -> None:
        super().replace_modules()
        model: Any = self.module.model
        # transformers selects the tokens by a mask, whose number of rows the host has to know
        model.language_model._deepstack_process = _add_rows

    def features(self, pixels: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        output = self.visual(pixels.to(self.visual.dtype), grid_thw=None, **arguments)
        return torch.cat((output.pooler_output, *output.deepstack_features), 1)

    def language_arguments(
        self, positions: Tensor, vision_token_index: Tensor, deeper: Sequence[Tensor]
    ) -> Mapping[str, Any]:
        return {"position_ids": self.position_ids(positions), "visual_pos_masks": vision_token_index,
                "deepstack_visual_embeds": deeper}

    def vision_shape(self, config: Any) -> dict[str, Any]:
        return {**super().vision_shape(config),
                "feature_levels": 1 + len(config.vision_config.deepstack_visual_indexes)}


class Qwen3VLMoe(Qwen3VL):
    """`VisionLanguageModel` of Qwen3-VL with experts."""

    model_class = Qwen3VLMoeForConditionalGeneration
    config_class = Qwen3VLMoeConfig


def _add_rows(hidden: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Hidden states (1, L, D) with `rows` (K, D) added at `index` (K,)."""
    return hidden.index_add(1, index, rows[None].to(hidden.dtype))
