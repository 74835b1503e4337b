"""Qwen2.5-VL through transformers: context parallelism comes in as an attention function of its registry, our kernels
as the attention of its vision blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dhp_ray.compatibility import checkpoint_activations, rope_positions
from dhp_ray.model import attention
from dhp_ray.model.adapter import PARTS, EncoderArguments, NodeUnits, empty_features
from dhp_ray.model.attention import PackContext
from dhp_ray.model.files import ModelError
from dhp_ray.model.fused import Operators, fuse
from dhp_ray.model.loss import LossHead
from dhp_ray.model.qwen2_5_vl_decoder import LanguageAttention
from dhp_ray.model.qwen2_5_vl_encoder import PatchEmbedding, VisionAttention, encoder_arguments
from dhp_ray.model.weights import StoredWeights
from dhp_ray.planner.model_shape import LayerShape, ModelShape

ATTENTION = {"text_config": "dhp_ring"}
# "dynamic" and "longrope" choose frequencies by the longest position that a call sees, so shards of one sequence would
# differ.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


class Qwen25VL:
    """`ModelAdapter` of Qwen2.5-VL (arXiv 2502.13923)."""

    model_class = Qwen2_5_VLForConditionalGeneration
    config_class = Qwen2_5_VLConfig
    stored_names = ((r"^visual\.", "model.visual."),
                    (r"^model\.(?!language_model\.|visual\.)", "model.language_model."))
    """Names in the published files, which are older than the module's, and what they are now."""

    def __init__(self, module: Qwen2_5_VLForConditionalGeneration) -> None:
        check(module.config)
        attention.register()
        module.set_attn_implementation(ATTENTION)
        visual: Any = module.model.visual
        visual.patch_embed = PatchEmbedding(visual.patch_embed)
        for block in visual.blocks:
            block.attn = VisionAttention(block.attn)
        self.module = module.train()
        self._head = LossHead(module.lm_head)
        self.weights: StoredWeights | None = None
        vision: Any = module.config.vision_config
        text: Any = module.config.text_config
        self.feature_width: int = vision.out_hidden_size
        self.image_token_id: int = module.config.image_token_id
        self.video_token_id: int = module.config.video_token_id
        self.merge_area: int = vision.spatial_merge_size ** 2
        self.patch_dim: int = vision.in_channels * vision.temporal_patch_size * vision.patch_size ** 2
        self.vocabulary_size: int = text.vocab_size
        self._num_dimensions = {name: parameter.ndim for name, parameter in module.named_parameters()}

    @staticmethod
    def shape(config: Qwen2_5_VLConfig) -> ModelShape:
        """What planner, costs and memory need to know of a model with this configuration.

        Raises:
            ModelError: it cannot be trained.
        """
        check(config)
        return shape_of(config)

    def positions(self, input_ids: Tensor, grids: Tensor, seconds: Tensor | None = None) -> Tensor:
        """M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1) of one sequence, by the model's own function: (3, L) int64.
        """
        if not len(grids):
            return torch.arange(len(input_ids)).expand(3, -1)
        input_ids, grids = input_ids.long(), grids.long()
        # 0 text, 1 image, 2 video
        kinds = (input_ids == self.image_token_id).int() + 2 * (input_ids == self.video_token_id).int()
        seconds = seconds.float() if seconds is not None else torch.zeros(len(grids))
        is_video = seconds > 0
        return rope_positions(self.module.model, input_ids, kinds, grids[~is_video], grids[is_video], seconds[is_video])

    def encoder_arguments(self, grids: Sequence[Sequence[int]]) -> EncoderArguments:
        return encoder_arguments(grids, self.module.config.vision_config) if grids else {}

    def encode(self, pixels: Tensor, arguments: EncoderArguments) -> Tensor:
        if not arguments:
            return empty_features(self)
        visual = self.module.model.visual
        features: Tensor = visual(pixels.to(visual.dtype), grid_thw=None, **arguments).pooler_output
        return features

    def decode(
        self, token_ids: Tensor, positions: Tensor, vision_token_index: Tensor, features: Tensor, context: PackContext
    ) -> Tensor:
        language_model = self.module.model.language_model
        num_tokens = len(token_ids)
        # transformers' layers cannot reshape (0, D), and every member takes part in every layer: an idle token does,
        # seen by no other
        if not num_tokens:
            token_ids, positions = token_ids.new_zeros(1), positions.new_zeros((3, 1))
        embeddings = language_model.embed_tokens(token_ids)
        # Also without a row to write: it ties this rank's backward pass to the exchange that `features` came from.
        embeddings = embeddings.index_copy(0, vision_token_index, features.to(embeddings.dtype))
        output = language_model(
            inputs_embeds=embeddings[None], position_ids=positions[:, None], attention_mask={"full_attention": None},
            use_cache=False, context=context)
        hidden: Tensor = output.last_hidden_state[0][:num_tokens]
        return hidden

    def loss_sum(self, hidden: Tensor, labels: Tensor, valid_index: Tensor) -> Tensor:
        loss: Tensor = self._head(hidden, labels, valid_index)
        return loss

    def is_vision(self, parameter_name: str) -> bool:
        return parameter_name.startswith("model.visual.")

    def decays(self, parameter_name: str) -> bool:
        return self._num_dimensions[parameter_name] > 1

    def trains(self, part: str) -> bool:
        return any(parameter.requires_grad for name, parameter in self.module.named_parameters()
                   if self.is_vision(name) == (part == "vision"))

    def freeze(self, parts: Sequence[str]) -> None:
        for part in parts:
            if part not in PARTS:
                raise ModelError(f"train.freeze: got {part!r}; allowed: {', '.join(PARTS)}")
            for name, parameter in self.module.named_parameters():
                if self.is_vision(name) == (part == "vision"):
                    parameter.requires_grad_(False)

    def units(self) -> list[Module]:
        model: Any = self.module.model
        return [*model.visual.blocks, model.visual, *model.language_model.layers]

    def node_units(self) -> NodeUnits:
        visual: Any = self.module.model.visual
        language: Any = self.module.model.language_model
        modules = [visual.patch_embed, *visual.blocks, visual.merger, *language.layers, language.norm]
        return NodeUnits(modules, self._head, language.embed_tokens)

    def fuse(self, operators: Operators) -> None:
        visual: Any = self.module.model.visual
        language: Any = self.module.model.language_model
        for block in visual.blocks:
            fuse(block, operators, ("norm1", "norm2"), visual.config.hidden_act)
            block.attn.operators = operators
        fuse(visual.merger, operators, ("ln_q",))
        for layer in language.layers:
            fuse(layer, operators, ("input_layernorm", "post_attention_layernorm"), language.config.hidden_act)
            if language.rotary_emb.attention_scaling == 1:  # npu_rotary_mul takes cosines and sines in [-1, 1]
                layer.self_attn = LanguageAttention(layer.self_attn, operators)
        fuse(language, operators, ("norm",))

    def set_activation_checkpointing(self, wanted: bool = True) -> None:
        checkpoint_activations(self.module, wanted)
        # transformers also makes every embedding require a gradient, which only the reentrant kind needs. With a frozen
        # encoder its features would then want a backward pass on the ranks that have images, and on no other: the
        # exchange would hang.
        self.module.disable_input_require_grads()

    def save(self, folder: str | Path, parameters: Mapping[str, Tensor]) -> None:
        """Write config.json, generation_config.json and safetensors in the Hugging Face form, in fp32."""
        expected = [name for name, _ in self.module.named_parameters()]
        missing = sorted(set(expected) - set(parameters))
        if missing:
            raise ModelError(f"model: cannot save: no value for {len(missing)} parameters, the first is {missing[0]}")
        # A model without memory gives its form: the live one's parameters may be bf16 views of the engine's buffer.
        with torch.device("meta"):
            form = self.model_class(self.module.config.__class__.from_dict(self.module.config.to_dict()))
        form.generation_config = self.module.generation_config
        form.save_pretrained(folder, state_dict={name: parameters[name].float().contiguous() for name in expected})


def check(config: Qwen2_5_VLConfig) -> None:
    """Refuse what context parallelism here does not compute.

    Raises:
        ModelError: sliding windows, dropout, or rotary frequencies that depend on the call.
    """
    text: Any = config.text_config
    kinds = sorted(set(text.layer_types) - {"full_attention"})
    if text.use_sliding_window or kinds:
        raise ModelError(
            f"model: layers of {', '.join(kinds) or 'sliding windows'} (use_sliding_window={text.use_sliding_window}); "
            "allowed: full_attention"
        )
    if text.attention_dropout:
        raise ModelError(f"model: attention_dropout is {text.attention_dropout}; allowed: 0")
    rope_type = text.rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"model: rope_type is {rope_type!r}; allowed: {', '.join(ROPE_TYPES)}")


def shape_of(config: Qwen2_5_VLConfig) -> ModelShape:
    """The shape of a Qwen2.5-VL: every block of the encoder is alike but for the window that its attention sees."""
    text: Any = config.text_config
    vision: Any = config.vision_config
    merge_area = vision.spatial_merge_size ** 2
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size ** 2
    merger_width = merge_area * vision.hidden_size
    width, mlp, head_width = text.hidden_size, text.intermediate_size, text.hidden_size // text.num_attention_heads
    key_values = text.num_key_value_heads * head_width
    # q, k and v have biases; o and the MLP have none; two norms
    layer = 2 * width * (width + key_values) + width + 2 * key_values + 3 * width * mlp + 2 * width
    vision_width, vision_mlp = vision.hidden_size, vision.intermediate_size
    # all products have biases; two norms
    block = (4 * vision_width * (vision_width + 1) + 3 * vision_width * vision_mlp + 2 * vision_mlp + vision_width
             + 2 * vision_width)
    num_full = len(set(vision.fullatt_block_indexes) & set(range(vision.depth)))
    window = (vision.window_size // vision.patch_size) ** 2
    blocks = [
        LayerShape(count=count, width=vision_width, mlp_width=vision_mlp, heads=vision.num_heads,
                   key_value_heads=vision.num_heads, head_width=vision_width // vision.num_heads, num_parameters=block,
                   window=seen)
        for count, seen in ((vision.depth - num_full, window), (num_full, 0)) if count]
    return ModelShape(
        family=config.model_type,
        language=(LayerShape(count=text.num_hidden_layers, width=width, mlp_width=mlp, heads=text.num_attention_heads,
                             key_value_heads=text.num_key_value_heads, head_width=head_width, num_parameters=layer),),
        vision=tuple(blocks), vocabulary_size=text.vocab_size, tied=bool(config.tie_word_embeddings),
        language_rest=width,
        vision_rest=(patch_dim * vision_width + vision_width + merger_width * (merger_width + 1)
                     + (merger_width + 1) * vision.out_hidden_size),
        patch_dim=patch_dim, merge_area=merge_area, merger_width=merger_width,
        token_pixels=merge_area * vision.patch_size ** 2)
