"""InternVL3 and 3.5 in the Hugging Face format (arXiv 2504.10479): an image is a row of tiles of one size, each encoded
for itself.

A grid is (tiles, height, width) in patches, so that tiles are what steps in time are elsewhere. In each tile the
encoder has one token more (`cls`), which is dropped behind it; pixel shuffle then makes one vision token of four
patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F
from transformers import InternVLConfig, InternVLForConditionalGeneration, PreTrainedConfig, PreTrainedModel

from dhp_ray.model.files import ModelError
from dhp_ray.model.fused import Operators, fuse
from dhp_ray.model.language_model import EncoderArguments, LayerStack, num_parameters
from dhp_ray.model.vision_language_model import VisionLanguageModel
from dhp_ray.planner.memory.model_shape import LayerShape
from dhp_ray.planner.plan.types import Grid

TEXT_MODELS = ("qwen2", "qwen3")


class InternVL(VisionLanguageModel):
    """`VisionLanguageModel` of InternVL."""

    model_class: ClassVar[type[PreTrainedModel]] = InternVLForConditionalGeneration
    config_class: ClassVar[type[PreTrainedConfig]] = InternVLConfig
    stored_names: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^language_model\.lm_head", "lm_head"), (r"^language_model\.(model\.)?", "model.language_model."),
        (r"^vision_tower", "model.vision_tower"), (r"^multi_modal_projector", "model.multi_modal_projector"))
    vision_prefixes: ClassVar[tuple[str, ...]] = ("model.vision_tower.", "model.multi_modal_projector.")

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        vision, text = config.vision_config, config.text_config
        if text.model_type not in TEXT_MODELS:
            raise ModelError(f"model: an InternVL over {text.model_type!r}; allowed: {', '.join(TEXT_MODELS)}")
        if (config.vision_feature_layer, config.vision_feature_select_strategy) != (-1, "default"):
            raise ModelError(f"model: vision_feature_layer={config.vision_feature_layer} with "
                             f"vision_feature_select_strategy={config.vision_feature_select_strategy!r}; allowed: -1 "
                             "with 'default'")
        for name in ("hidden_dropout_prob", "attention_dropout", "projection_dropout"):
            if getattr(vision, name):
                raise ModelError(f"model: {name} is {getattr(vision, name)}; allowed: 0")

    def replace_modules(self) -> None:
        model: Any = self.module.model
        model.vision_tower.embeddings = TileEmbedding(model.vision_tower.embeddings)

    @property
    def smallest_grid(self) -> Grid:
        return (1, *_tile(self.module.config.vision_config))

    def arguments_of(self, grids: Tensor) -> EncoderArguments:
        tile = self.smallest_grid[1:]
        if [tuple(size) for size in grids[:, 1:].tolist()] != [tile] * len(grids):
            raise ValueError(f"grids of {grids.tolist()}; allowed: tiles of {tile[0]} x {tile[1]} patches")
        return {"num_tiles": grids[:, 0]}

    def features(self, pixels: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        model: Any = self.module.model
        _, height, width = self.smallest_grid
        hidden = model.vision_tower(pixel_values=pixels.view(-1, height * width, self.patch_dim)).last_hidden_state
        tiles = hidden[:, 1:].reshape(-1, height, width, hidden.shape[-1])
        shuffled = model.pixel_shuffle(tiles, scale_factor=model.config.downsample_ratio)
        features: Tensor = model.multi_modal_projector(shuffled.flatten(0, 2))
        return features

    def vision_units(self) -> list[Module]:
        projector: Any = self.module.model.multi_modal_projector  # type: ignore[union-attr]
        return [*super().vision_units(), projector]

    def sharded_shapes(self) -> dict[Parameter, tuple[int, ...]]:
        """Its tables have one row, of which sharding would make a row a rank."""
        embeddings: Any = self.module.model.vision_tower.embeddings  # type: ignore[union-attr]
        tables = embeddings.cls_token, embeddings.position_embeddings, embeddings.mask_token
        return super().sharded_shapes() | {table: tuple(table.squeeze().shape) for table in tables if table is not None}

    def vision_stack(self) -> LayerStack:
        tower: Any = self.module.model.vision_tower  # type: ignore[union-attr]
        return LayerStack(tower, tower.encoder.layer)

    def fuse_encoder(self, operators: Operators) -> None:
        """Nothing is rotated, and the MLPs have no gate. Of its norms the larger encoder's are RMS norms."""
        config: Any = self.module.config.vision_config
        for layer in self.module.model.vision_tower.encoder.layer:  # type: ignore[union-attr]
            if config.norm_type == "rms_norm":
                fuse(layer, operators, ("layernorm_before", "layernorm_after"))
            if config.use_qk_norm:
                fuse(layer.attention, operators, ("q_norm", "k_norm"))

    def vision_shape(self, config: Any) -> dict[str, Any]:
        model: Any = self.module.model
        vision, merge_area = config.vision_config, round(1 / config.downsample_ratio) ** 2
        patch_area = vision.patch_size[0] * vision.patch_size[1]
        width, heads = vision.hidden_size, vision.num_attention_heads
        layers, projector = model.vision_tower.encoder.layer, num_parameters(model.multi_modal_projector)
        shape = LayerShape(
            count=vision.num_hidden_layers, width=width, mlp_width=vision.intermediate_size, heads=heads,
            key_value_heads=heads, head_width=width // heads, num_parameters=num_parameters(layers[0]), gated=False,
            layer_norms=vision.norm_type == "layer_norm", query_key_norms=vision.use_qk_norm)
        return {"vision": (shape,), "vision_projector": projector, "patch_dim": vision.num_channels * patch_area,
                "vision_rest": num_parameters(model.vision_tower) - num_parameters(layers) + projector,
                "merge_area": merge_area, "merger_width": config.text_config.hidden_size,
                "token_pixels": merge_area * patch_area}


class TileEmbedding(Module):
    """The embedding of tiles, with the parameters of `plain`, as one product: its stride is its kernel."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.cls_token, self.position_embeddings = plain.cls_token, plain.position_embeddings
        self.mask_token, self.patch_embeddings = plain.mask_token, plain.patch_embeddings

    def forward(self, pixel_values: Tensor, bool_masked_pos: None = None) -> Tensor:
        """(T, N + 1, width) of T tiles of N patches, `pixel_values` (T, N, channels x height x width).

        The token (1, 1, width) and the positions (1, N + 1, width) may also be without their leading ones.
        """
        projection = self.patch_embeddings.projection
        patches = F.linear(pixel_values.to(projection.weight.dtype), projection.weight.flatten(1), projection.bias)
        embeddings = torch.cat((self.cls_token.expand(len(patches), 1, -1), patches), 1)
        return embeddings if self.position_embeddings is None else embeddings + self.position_embeddings


def _tile(vision: Any) -> tuple[int, int]:
    """Height and width of a tile in patches."""
    return vision.image_size[0] // vision.patch_size[0], vision.image_size[1] // vision.patch_size[1]
