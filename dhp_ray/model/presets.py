"""Small models built from a configuration of ours, with fresh weights, over the byte tokenizer's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
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


def tiny(token_ids: Mapping[str, int]) -> Qwen2_5_VLConfig:
    """Qwen2.5-VL with 0.85 million parameters: 3 layers of width 128, and 2 vision blocks of width 64."""
    return _qwen2_5_vl(token_ids, width=128, layers=3, heads=4, vision_width=64, vision_blocks=2)


def small(token_ids: Mapping[str, int]) -> Qwen2_5_VLConfig:
    """Qwen2.5-VL with 7 million parameters: 8 layers of width 256, and 4 vision blocks of width 128."""
    return _qwen2_5_vl(token_ids, width=256, layers=8, heads=8, vision_width=128, vision_blocks=4)


def _qwen2_5_vl(
    token_ids: Mapping[str, int], width: int, layers: int, heads: int, vision_width: int, vision_blocks: int
) -> Qwen2_5_VLConfig:
    """Vision blocks but the last attend in windows of 4 x 4 tokens."""
    return Qwen2_5_VLConfig(
        # 16 frequencies of a head: time, height and width take 4, 6 and 6 (Qwen2.5-VL's 16, 24, 24 of 64)
        text_config=_text(token_ids, {"mrope_section": [4, 6, 6]}, width, layers, heads),
        vision_config={
            "depth": vision_blocks, "hidden_size": vision_width, "intermediate_size": 2 * vision_width,
            "num_heads": vision_width // 16, "out_hidden_size": width, "patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [vision_blocks - 1],
            "initializer_range": 0.02,
        },
        image_token_id=token_ids["image"], video_token_id=token_ids["video"],
        vision_start_token_id=token_ids["vision_start"], vision_end_token_id=token_ids["vision_end"],
        tie_word_embeddings=True)


def tiny_qwen3_vl(token_ids: Mapping[str, int]) -> Qwen3VLConfig:
    """Qwen3-VL with a million parameters: 4 layers of width 128, 3 vision blocks of width 64, features of 3 levels."""
    return Qwen3VLConfig(**_qwen3_vl(token_ids))


def tiny_qwen3_vl_moe(token_ids: Mapping[str, int]) -> Qwen3VLMoeConfig:
    """`tiny_qwen3_vl` with 6 experts of width 96 in a layer, of which each token takes 2: 1.6 million parameters."""
    return Qwen3VLMoeConfig(**_qwen3_vl(token_ids, **EXPERTS))


# 16 frequencies of a head: Qwen3-VL deals 24, 20 and 20 of 64 out in turn
QWEN3_VL_ROPE = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}


def _qwen3_vl(token_ids: Mapping[str, int], rope: Mapping[str, Any] = QWEN3_VL_ROPE, /, **more: Any) -> dict[str, Any]:
    return {
        "text_config": _text(token_ids, rope, 128, 4, 4, head_dim=32, **more),
        "vision_config": {
            "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 144,
            "deepstack_visual_indexes": [0, 1], "initializer_range": 0.02,
        },
        "image_token_id": token_ids["image"], "video_token_id": token_ids["video"],
        "vision_start_token_id": token_ids["vision_start"], "vision_end_token_id": token_ids["vision_end"],
        "tie_word_embeddings": True}


def tiny_qwen3_5(token_ids: Mapping[str, int]) -> Qwen3_5Config:
    """Qwen3.5 with 1.1 million parameters: 4 layers of width 128, the last one of attention; 3 vision blocks of width
    64.
    """
    return Qwen3_5Config(**_qwen3_5(token_ids))


def tiny_qwen3_5_moe(token_ids: Mapping[str, int]) -> Qwen3_5MoeConfig:
    """`tiny_qwen3_5` with 6 experts of width 96 in a layer, of which each token takes 2, and a shared one of width
    64: 1.5 million parameters.
    """
    tree = _qwen3_5(token_ids, **EXPERTS, shared_expert_intermediate_size=64)
    del tree["text_config"]["intermediate_size"]
    return Qwen3_5MoeConfig(**tree)


def _qwen3_5(token_ids: Mapping[str, int], **more: Any) -> dict[str, Any]:
    # 8 of 32 numbers of a head are rotated, by 4 frequencies: time, height and width take 2, 1 and 1
    rope = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    tree = _qwen3_vl(token_ids, rope, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
                     linear_num_value_heads=4, **more)
    del tree["vision_config"]["deepstack_visual_indexes"]
    return tree


def tiny_internvl(token_ids: Mapping[str, int]) -> InternVLConfig:
    """InternVL over Qwen2 with 0.75 million parameters: 3 layers of width 128, 2 vision layers of width 64, tiles of
    56 x 56 pixels.
    """
    return InternVLConfig(
        text_config=_text(token_ids, {}, 128, 3, 4, model_type="qwen2"),
        vision_config={
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
            "attention_bias": True, "image_size": [56, 56], "patch_size": [14, 14], "initializer_range": 0.02,
        },
        image_token_id=token_ids["image"], image_seq_length=4, tie_word_embeddings=True)


def tiny_qwen3(token_ids: Mapping[str, int]) -> Qwen3Config:
    """Qwen3 with 0.8 million parameters: 4 layers of width 128."""
    return Qwen3Config(**_text(token_ids, {}, 128, 4, 4, head_dim=32), tie_word_embeddings=True)


def tiny_qwen3_moe(token_ids: Mapping[str, int]) -> Qwen3MoeConfig:
    """`tiny_qwen3` with 6 experts of width 96 in a layer, of which each token takes 2: 1.1 million parameters."""
    return Qwen3MoeConfig(**_text(token_ids, {}, 128, 4, 4, head_dim=32, norm_topk_prob=True, **EXPERTS),
                          tie_word_embeddings=True)


def tiny_llama(token_ids: Mapping[str, int]) -> LlamaConfig:
    """Llama 3 with 0.8 million parameters: 4 layers of width 128, a head of its own, and frequencies of `llama3`."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}
    return LlamaConfig(**_text(token_ids, rope, 128, 4, 4), tie_word_embeddings=False)


def _text(
    token_ids: Mapping[str, int], rope: Mapping[str, Any], width: int, layers: int, heads: int, **more: Any
) -> dict[str, Any]:
    """A language model's configuration. Heads are 32 wide, two share a key and value."""
    return {
        "hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "vocab_size": vocabulary_size(token_ids),
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        # no pad_token_id: an embedding with a padding index drops that token's gradient
        "bos_token_id": token_ids["bos"], "eos_token_id": token_ids["eos"], **more}


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96}

PRESETS: dict[str, Callable[[Mapping[str, int]], PreTrainedConfig]] = {
    "tiny": tiny, "small": small, "tiny_internvl": tiny_internvl, "tiny_llama": tiny_llama, "tiny_qwen3": tiny_qwen3,
    "tiny_qwen3_5": tiny_qwen3_5, "tiny_qwen3_5_moe": tiny_qwen3_5_moe, "tiny_qwen3_moe": tiny_qwen3_moe,
    "tiny_qwen3_vl": tiny_qwen3_vl, "tiny_qwen3_vl_moe": tiny_qwen3_vl_moe}


def preset_config(name: str, token_ids: Mapping[str, int] | None) -> PreTrainedConfig:
    """The configuration of a preset over a tokenizer with these special token ids.

    Raises:
        ModelError: an unknown preset, or token ids that lack one that it needs.
    """
    if name not in PRESETS:
        raise ModelError(f"model.preset: got {name!r}; allowed: {', '.join(sorted(PRESETS))}")
    try:
        return PRESETS[name](token_ids or {})
    except KeyError as error:
        raise ModelError(f"model.preset: {name} needs the tokenizer's id of {error.args[0]}") from None


def vocabulary_size(token_ids: Mapping[str, int]) -> int:
    """256 bytes and the special tokens that follow them, rounded up to a multiple of 8."""
    return (max(255, *token_ids.values()) // 8 + 1) * 8
