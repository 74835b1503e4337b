"""Qwen2.5-VL (arXiv 2502.13923): an encoder that attends in windows, and M-RoPE positions with time in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from dhp_ray.model.adapter import EncoderArguments, LayerStack
from dhp_ray.model.families.base import VisionLanguageModel, language_layers
from dhp_ray.model.families.qwen_encoder import PatchEmbedding, VisionAttention
from dhp_ray.model.fused import Operators, fuse
from dhp_ray.model.kernels import Segments
from dhp_ray.model.rope_positions import mrope_positions
from dhp_ray.planner.memory.model_shape import LayerShape, ModelShape


class Qwen25VL(VisionLanguageModel):
    """`ModelAdapter` of Qwen2.5-VL.

    Its encoder's windows and images are segments of one sequence of patches:

        patches, window by window    w0 w0 w0 | w1 w1 | w2 w2 w2 || w3 w3 w3 | w4 w4      window_index brings them there
        most blocks attend within    a window   `cu_window_seqlens`
        `fullatt_block_indexes`      an image, or a step in time of a video   `cu_seqlens`
    """

    model_class: ClassVar[type[PreTrainedModel]] = Qwen2_5_VLForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = Qwen2_5_VLConfig
    stored_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^visual\.", "model.visual."), (r"^model\.(?!language_model\.|visual\.)", "model.language_model."))

    def replace_modules(self) -> None:
        visual: Any = self.module.model.visual  # type: ignore[union-attr]
        visual.patch_embed = PatchEmbedding(visual.patch_embed)
        for block in visual.blocks:
            block.attn = VisionAttention(block.attn)

    def vision_runs(self, grid: Sequence[int], is_video: bool) -> Sequence[int]:
        time, height, width = grid
        return (time * height * width // self.merge_area,)

    @classmethod
    def positions_of(
        cls, config: Any, input_ids: Tensor, grids: Tensor, seconds: Tensor | None = None
    ) -> Tensor:
        """M-RoPE, with the time between two steps of a video in seconds."""
        merge = config.vision_config.spatial_merge_size
        is_vision = (input_ids == config.image_token_id) | (input_ids == config.video_token_id)
        lasts = [0.0] * len(grids) if seconds is None else seconds.float().tolist()
        runs = [run for grid, step in zip(grids.tolist(), lasts) for run in cls.position_runs(config, grid, step)]
        return mrope_positions(is_vision, [(time, height // merge, width // merge)
                                           for (time, height, width), _ in runs], [interval for _, interval in runs])

    @staticmethod
    def position_runs(config: Any, grid: Sequence[int], seconds: float) -> list[tuple[Sequence[int], float]]:
        """The grid of each run of tokens of an image or video, and the positions between two steps in time of it."""
        return [(grid, config.vision_config.tokens_per_second * seconds if seconds else 1.0)]

    def arguments_of(self, grids: Tensor) -> EncoderArguments:
        config: Any = self.module.config.vision_config
        window_index, window_offsets = get_vision_window_index(grids, config.spatial_merge_size, config.window_size,
                                                               config.patch_size)
        return {"position_ids": get_vision_position_ids(grids, config.spatial_merge_size),
                "cu_seqlens": Segments.between(get_vision_cu_seqlens(grids).tolist()),
                "window_index": window_index, "cu_window_seqlens": Segments.between(window_offsets.tolist())}

    def features(self, pixels: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        visual: Any = self.module.model.visual  # type: ignore[union-attr]
        features: Tensor = visual(pixels.to(visual.dtype), grid_thw=None, **arguments).pooler_output
        return features

    def language_arguments(
        self, positions: Tensor, vision_token_index: Tensor, deeper: Sequence[Tensor]
    ) -> Mapping[str, Any]:
        return {"position_ids": self.position_ids(positions), "attention_mask": {"full_attention": None}}

    def vision_units(self) -> list[Module]:
        visual: Any = self.module.model.visual  # type: ignore[union-attr]
        return [*visual.blocks, visual]

    def vision_stack(self) -> LayerStack:
        visual: Any = self.module.model.visual  # type: ignore[union-attr]
        return LayerStack(visual, visual.blocks)

    def fuse_encoder(self, operators: Operators) -> None:
        visual: Any = self.module.model.visual  # type: ignore[union-attr]
        for block in visual.blocks:
            fuse(block, operators, ("norm1", "norm2"), visual.config.hidden_act)
            block.attn.operators = operators
        fuse(visual.merger, operators, ("ln_q",))

    @staticmethod
    def shape_of(config: Any) -> ModelShape:
        """Every block of the encoder is alike but for the window that its attention sees."""
        text: Any = config.text_config
        vision: Any = config.vision_config
        merge_area = vision.spatial_merge_size ** 2
        patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size ** 2
        width, mlp, merger_width = vision.hidden_size, vision.intermediate_size, merge_area * vision.hidden_size
        # all products have biases; two norms
        block = 4 * width * (width + 1) + 3 * width * mlp + 2 * mlp + width + 2 * width
        num_full = len(set(vision.fullatt_block_indexes) & set(range(vision.depth)))
        window = (vision.window_size // vision.patch_size) ** 2
        blocks = [
            LayerShape(count=count, width=width, mlp_width=mlp, heads=vision.num_heads,
                       key_value_heads=vision.num_heads, head_width=width // vision.num_heads, num_parameters=block,
                       window=seen)
            for count, seen in ((vision.depth - num_full, window), (num_full, 0)) if count]
        return ModelShape(
            family=config.model_type, language=(language_layers(text, biases=True, query_key_norms=False),),
            vision=tuple(blocks), vocabulary_size=text.vocab_size, tied=bool(config.tie_word_embeddings),
            language_rest=text.hidden_size,
            vision_rest=(patch_dim * width + width + merger_width * (merger_width + 1)
                         + (merger_width + 1) * vision.out_hidden_size),
            patch_dim=patch_dim, merge_area=merge_area, merger_width=merger_width,
            token_pixels=merge_area * vision.patch_size ** 2)
