"""Small models built from a configuration of ours, with fresh weights, over the byte tokenizer's vocabulary.

    tiny                Qwen2.5-VL      0.85 million parameters: 3 layers, and 2 vision blocks of width 64
    small               Qwen2.5-VL      7 million: 8 layers of width 256, and 4 vision blocks of width 128
    tiny_glm4v          GLM-4.1V        1.2 million: 4 layers, 3 vision blocks of width 64, positions of 12 x 12 patches
    tiny_internvl       InternVL        0.75 million: 3 layers of Qwen2, 2 vision layers of width 64, tiles of 56 x 56
    tiny_llama          Llama 3         0.8 million: 4 layers, a head of its own, and frequencies of `llama3`
    tiny_qwen3          Qwen3           0.8 million: 4 layers
    tiny_qwen3_moe      Qwen3-MoE       1.1 million: the same with experts
    tiny_qwen3_vl       Qwen3-VL        a million: 4 layers, 3 vision blocks of width 64, features of 3 levels
    tiny_qwen3_vl_moe   Qwen3-VL-MoE    1.6 million: the same with experts
    tiny_qwen3_5        Qwen3.5         1.1 million: 4 layers, the last one of attention; 3 vision blocks of width 64
    tiny_qwen3_5_moe    Qwen3.5-MoE     1.5 million: the same with experts, and a shared one of width 64

Layers are 128 wide where nothing is said, heads 32, and two heads share a key and value. A layer with experts has 6 of
width 96, of which each token takes 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    Glm4vConfig,
    InternVLConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from dhp_ray.model.files import ModelError

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96}

# A head of 32 has 16 frequencies, for time, height and width. Qwen2.5-VL gives each its own (16, 24 and 24 of 64),
# Qwen3-VL deals them out in turn (24, 20 and 20). Qwen3.5 rotates 8 numbers of a head alone, by 4 frequencies; GLM-4.1V
# half of them, by 8 (time, height and width have 8, 12 and 12 of 64).
QWEN2_5_VL_ROPE = {"mrope_section": [4, 6, 6]}
QWEN3_VL_ROPE = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
QWEN3_5_ROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
GLM4V_ROPE = {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
LLAMA_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}

PRESETS: dict[str, Callable[[Mapping[str, int]], PreTrainedConfig]] = {
    "tiny": lambda ids: Qwen2_5_VLConfig(**_qwen2_5_vl(ids, 128, 3, 4, vision_width=64, vision_blocks=2)),
    "small": lambda ids: Qwen2_5_VLConfig(**_qwen2_5_vl(ids, 256, 8, 8, vision_width=128, vision_blocks=4)),
    "tiny_glm4v": lambda ids: Glm4vConfig(**_glm4v(ids)),
    "tiny_internvl": lambda ids: InternVLConfig(**_internvl(ids)),
    "tiny_llama": lambda ids: LlamaConfig(**_text(ids, LLAMA_ROPE, 128, 4, 4), tie_word_embeddings=False),
    "tiny_qwen3": lambda ids: Qwen3Config(**_text(ids, {}, 128, 4, 4, head_dim=32), tie_word_embeddings=True),
    "tiny_qwen3_moe": lambda ids: Qwen3MoeConfig(
        **_text(ids, {}, 128, 4, 4, head_dim=32, norm_topk_prob=True, **EXPERTS), tie_word_embeddings=True),
    "tiny_qwen3_vl": lambda ids: Qwen3VLConfig(**_qwen3_vl(ids, QWEN3_VL_ROPE)),
    "tiny_qwen3_vl_moe": lambda ids: Qwen3VLMoeConfig(**_qwen3_vl(ids, QWEN3_VL_ROPE, norm_topk_prob=True, **EXPERTS)),
    "tiny_qwen3_5": lambda ids: Qwen3_5Config(**_qwen3_5(ids)),
    "tiny_qwen3_5_moe": lambda ids: Qwen3_5MoeConfig(**_qwen3_5(ids, **EXPERTS, shared_expert_intermediate_size=64))}


def _qwen2_5_vl(
    token_ids: Mapping[str, int], width: int, layers: int, heads: int, vision_width: int, vision_blocks: int
) -> dict[str, Any]:
    """Vision blocks but the last attend in windows of 4 x 4 tokens."""
    return _with_encoder(token_ids, _text(token_ids, QWEN2_5_VL_ROPE, width, layers, heads), {
        "depth": vision_blocks, "hidden_size": vision_width, "intermediate_size": 2 * vision_width,
        "num_heads": vision_width // 16, "out_hidden_size": width, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [vision_blocks - 1],
        "initializer_range": 0.02})


def _qwen3_vl(token_ids: Mapping[str, int], rope: Mapping[str, Any], /, **more: Any) -> dict[str, Any]:
    return _with_encoder(token_ids, _text(token_ids, rope, 128, 4, 4, head_dim=32, **more), {
        "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 144,
        "deepstack_visual_indexes": [0, 1], "initializer_range": 0.02})


def _qwen3_5(token_ids: Mapping[str, int], **experts: Any) -> dict[str, Any]:
    tree = _qwen3_vl(token_ids, QWEN3_5_ROPE, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
                     linear_num_value_heads=4, **experts)
    del tree["vision_config"]["deepstack_visual_indexes"]
    if experts:
        del tree["text_config"]["intermediate_size"]
    return tree


def _glm4v(token_ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": _text(token_ids, GLM4V_ROPE, 128, 4, 4),
        "vision_config": {
            "depth": 3, "hidden_size": 64, "intermediate_size": 192, "num_heads": 4, "out_hidden_size": 128,
            "patch_size": 14, "image_size": 168, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "initializer_range": 0.02},
        "image_token_id": token_ids["image"], "video_token_id": token_ids["video"],
        "image_start_token_id": token_ids["vision_start"], "image_end_token_id": token_ids["vision_end"],
        "video_start_token_id": token_ids["video_start"], "video_end_token_id": token_ids["video_end"],
        "tie_word_embeddings": False}


def _internvl(token_ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": _text(token_ids, {}, 128, 3, 4, model_type="qwen2"),
        "vision_config": {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
            "attention_bias": True, "image_size": [56, 56], "patch_size": [14, 14], "initializer_range": 0.02},
        "image_token_id": token_ids["image"], "image_seq_length": 4, "tie_word_embeddings": True}


def _with_encoder(token_ids: Mapping[str, int], text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "text_config": text, "vision_config": vision,
        "image_token_id": token_ids["image"], "video_token_id": token_ids["video"],
        "vision_start_token_id": token_ids["vision_start"], "vision_end_token_id": token_ids["vision_end"],
        "tie_word_embeddings": True}


def _text(
    token_ids: Mapping[str, int], rope: Mapping[str, Any], width: int, layers: int, heads: int, **more: Any
) -> dict[str, Any]:
    vocabulary = (max(255, *token_ids.values()) // 8 + 1) * 8  # bytes, then special tokens
    return {
        "hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "vocab_size": vocabulary,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        # no pad_token_id: an embedding with a padding index drops that token's gradient
        "bos_token_id": token_ids["bos"], "eos_token_id": token_ids["eos"], **more}


def preset_config(name: str, token_ids: Mapping[str, int] | None) -> PreTrainedConfig:
    """The configuration of a preset over a tokenizer with these special token ids. ModelError: an unknown preset, or
    token ids that lack one that it needs.
    """
    if name not in PRESETS:
        raise ModelError(f"model.preset: got {name!r}; allowed: {', '.join(sorted(PRESETS))}")
    try:
        return PRESETS[name](token_ids or {})
    except KeyError as error:
        raise ModelError(f"model.preset: {name} needs the tokenizer's id of {error.args[0]}") from None
