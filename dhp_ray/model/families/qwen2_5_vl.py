"""Qwen2.5-VL (arXiv 2502.13923): an encoder that attends in windows, and M-RoPE positions with time in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from dhp_ray.model.fused import Operators, fuse
from dhp_ray.model.language_model import EncoderArguments, LayerStack, num_parameters
from dhp_ray.model.segment_attention import Segments, segment_attention
from dhp_ray.model.vision_language_model import VisionLanguageModel
from dhp_ray.planner.memory.model_shape import LayerShape


class Qwen25VL(VisionLanguageModel):
    """`VisionLanguageModel` of Qwen2.5-VL.

    Its encoder's windows and images are segments of one sequence of patches:

        patches, window by window    w0 w0 w0 | w1 w1 | w2 w2 w2 || w3 w3 w3 | w4 w4      window_index brings them there
        most blocks attend within    a window   `cu_window_seqlens`
        `fullatt_block_indexes`      an image, or a step in time of a video   `cu_seqlens`
    """

    model_class: ClassVar[type[PreTrainedModel]] = Qwen2_5_VLForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = Qwen2_5_VLConfig
    stored_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^visual\.", "model.visual."), (r"^model\.(?!language_model\.|visual\.)", "model.language_model."))

    @property
    def visual(self) -> Any:
        """The encoder."""
        return self.module.model.visual  # type: ignore[union-attr]

    def replace_modules(self) -> None:
        self.visual.patch_embed = PatchEmbedding(self.visual.patch_embed)
        for block in self.visual.blocks:
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

    @staticmethod
    def position_ids(positions: Tensor) -> Tensor:
        return positions[:, None]

    def arguments_of(self, grids: Tensor) -> EncoderArguments:
        config: Any = self.module.config.vision_config
        window_index, window_offsets = get_vision_window_index(grids, config.spatial_merge_size, config.window_size,
                                                               config.patch_size)
        return {"position_ids": get_vision_position_ids(grids, config.spatial_merge_size),
                "cu_seqlens": Segments.between(get_vision_cu_seqlens(grids).tolist()),
                "window_index": window_index, "cu_window_seqlens": Segments.between(window_offsets.tolist())}

    def features(self, pixels: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        features: Tensor = self.visual(pixels.to(self.visual.dtype), grid_thw=None, **arguments).pooler_output
        return features

    def vision_stack(self) -> LayerStack:
        return LayerStack(self.visual, self.visual.blocks)

    def fuse_encoder(self, operators: Operators) -> None:
        for block in self.visual.blocks:
            fuse(block, operators, ("norm1", "norm2"), self.visual.config.hidden_act)
            block.attn.operators = operators
        fuse(self.visual.merger, operators, ("ln_q",))

    def vision_shape(self, config: Any) -> dict[str, Any]:
        vision = config.vision_config
        merge_area, patch_area = vision.spatial_merge_size ** 2, vision.patch_size ** 2
        blocks = LayerShape(
            count=vision.depth, width=vision.hidden_size, mlp_width=vision.intermediate_size, heads=vision.num_heads,
            key_value_heads=vision.num_heads, head_width=vision.hidden_size // vision.num_heads,
            num_parameters=num_parameters(self.visual.blocks[0]))
        return {"vision": self.kinds_of_blocks(vision, blocks), "merge_area": merge_area,
                "vision_rest": num_parameters(self.visual) - num_parameters(self.visual.blocks),
                "patch_dim": vision.in_channels * vision.temporal_patch_size * patch_area,
                "merger_width": merge_area * vision.hidden_size, "token_pixels": merge_area * patch_area}

    def kinds_of_blocks(self, vision: Any, blocks: LayerShape) -> tuple[LayerShape, ...]:
        """All `blocks` of the encoder by their kinds: they are alike but for the window that their attention sees."""
        num_full = len(set(vision.fullatt_block_indexes) & set(range(vision.depth)))
        window = (vision.window_size // vision.patch_size) ** 2
        return tuple(replace(blocks, count=count, window=seen)
                     for count, seen in ((vision.depth - num_full, window), (num_full, 0)) if count)


class PatchEmbedding(Module):
    """The embedding of patches, with the weight of `plain`: its convolution's stride is its kernel, so each patch is
    multiplied with one matrix. The convolution itself fails in bf16 on NPUs.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.proj = plain.proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(P, width) of patches `hidden_states` (P, channels x frames x height x width)."""
        weight = self.proj.weight.flatten(1)
        return F.linear(hidden_states.to(weight.dtype), weight, self.proj.bias)


class VisionAttention(Module):
    """A vision block's attention over our kernels, with the weights of `plain`.

    transformers would cut queries, keys and values apart at offsets that it reads from the device, and call attention
    once an image or window: its registry of attention functions comes after that.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads, self.scaling = plain.qkv, plain.proj, plain.num_heads, plain.scaling
        self.operators: Operators | None = None

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
        q, k = (new.squeeze(0).transpose(0, 1).to(old.dtype) for new, old in zip(rotated, (q, k)))
        return q, k


def mrope_positions(is_vision: Tensor, grids: Sequence[Sequence[int]], intervals: Sequence[float]) -> Tensor:
    """The positions (3, L) of one sequence, int64, in time, height and width (M-RoPE: arXiv 2409.12191, section 2.1).

    Text counts on all axes alike. An image or video begins where the text before it ends, and the text behind it goes
    on after its largest position on any axis: behind a long video that is its time. This is how the published weights
    were trained, and what serving engines compute. transformers 5 goes on after the larger side of the picture.

    Args:
        is_vision: (L,) bool, the tokens of images and videos.
        grids: time, height and width in tokens of each image and video, in the order of the sequence.
        intervals: positions between two steps in time of each, as a fraction; the product with the step is cut off.
    """
    places = is_vision.nonzero()[:, 0].tolist()
    found, done, taken, position = [], 0, 0, 0
    for (time, height, width), interval in zip(grids, intervals, strict=True):
        num_text = places[taken] - done
        start = position + num_text
        steps = (torch.arange(time, dtype=torch.float32) * interval).long()
        block = torch.stack(torch.meshgrid(steps, torch.arange(height), torch.arange(width), indexing="ij"))
        found += [torch.arange(position, start).expand(3, -1), start + block.flatten(1)]
        position = start + int(block.max()) + 1
        done += num_text + time * height * width
        taken += time * height * width
    return torch.cat([*found, torch.arange(position, position + len(is_vision) - done).expand(3, -1)], 1)
