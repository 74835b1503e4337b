"""The published configurations of Qwen2.5-VL (config.json of Qwen/Qwen2.5-VL-3B-Instruct and its larger siblings), of
Qwen3-VL (Qwen/Qwen3-VL-2B-Instruct), of InternVL3 (OpenGVLab/InternVL3-1B-hf), of Qwen3 and Llama 3 (Qwen/Qwen3-8B,
meta-llama/Meta-Llama-3-8B-Instruct), of Qwen3.5 (Qwen/Qwen3.5-9B), and of those with experts (Qwen/Qwen3-30B-A3B,
Qwen/Qwen3-VL-30B-A3B-Instruct), made of the sizes in conf/model_shape, and models of them without memory.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
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

from dhp_ray.model.build import meta_model
from dhp_ray.planner.memory.model_shape import ModelShape

CONF = Path(__file__).resolve().parents[1] / "conf"  # dhp_ray.config needs OmegaConf

TEXT = {"3B": "qwen2_5_vl_3b", "7B": "qwen2_5_vl_7b", "32B": "qwen2_5_vl_32b", "72B": "qwen2_5_vl_72b"}
QWEN3 = {f"Qwen3-VL-{size}": f"qwen3_vl_{size.lower()}" for size in ("2B", "4B", "8B", "32B")}
GLM = {"GLM-4.1V-9B": "glm_4_1v_9b"}
INTERNVL = {f"InternVL3-{size}": f"internvl3_{size.lower()}" for size in ("1B", "2B", "8B", "38B")}
"""The file of conf/model_shape that has each one's sizes; its encoder of 6 billion marks the largest InternVL3."""
LANGUAGE = {f"Qwen3-{size}": f"qwen3_{size.lower()}" for size in ("4B", "8B", "32B")} | {
    f"Llama-3-{size}": f"llama3_{size.lower()}" for size in ("8B", "70B")}
"""Models of text alone."""
EXPERTS = {f"Qwen3-{size}": f"qwen3_{size.lower().replace('-', '_')}" for size in ("30B-A3B", "235B-A22B")} | {
    f"Qwen3-VL-{size}": f"qwen3_vl_{size.lower().replace('-', '_')}" for size in ("30B-A3B", "235B-A22B")}
"""Models with experts."""
HYBRID = {f"Qwen3.5-{size}": f"qwen3_5_{size.lower().replace('-', '_')}" for size in (
    "9B", "27B", "35B-A3B", "397B-A17B")}
"""Models with gated delta nets in three of four layers; two have experts too."""
NUM_PARAMETERS = {"3B": 3_754_622_976, "7B": 8_292_166_656, "32B": 33_452_718_336, "72B": 73_410_777_344,
                  "Qwen3-VL-2B": 2_127_532_032, "Qwen3-VL-4B": 4_437_815_808, "Qwen3-VL-8B": 8_767_123_696,
                  "Qwen3-VL-32B": 33_357_390_064, "InternVL3-1B": 938_193_024,
                  "InternVL3-2B": 2_088_957_440, "InternVL3-8B": 7_944_373_760, "InternVL3-38B": 38_388_164_992,
                  "GLM-4.1V-9B": 10_292_777_472,
                  "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360, "Qwen3-32B": 32_762_123_264,
                  "Llama-3-8B": 8_030_261_248, "Llama-3-70B": 70_553_706_496,
                  "Qwen3-30B-A3B": 30_532_122_624, "Qwen3-235B-A22B": 235_093_634_560,
                  "Qwen3-VL-30B-A3B": 31_070_754_032, "Qwen3-VL-235B-A22B": 235_670_022_896}
"""As the model cards' safetensors have them."""


def published_config(name: str, num_layers: int = 0) -> PreTrainedConfig:
    """A published configuration; with `num_layers`, so many of the language model's and of the encoder's layers: of
    Qwen2.5-VL's encoder the last one with full attention, of Qwen3-VL's the first ones giving features."""
    if name in QWEN3 or (name in EXPERTS and "VL" in name):
        return _qwen3_vl(name, num_layers)
    if name in HYBRID:
        return _qwen3_5(name, num_layers)
    if name in GLM:
        return _glm(name, num_layers)
    if name in INTERNVL:
        return _internvl(name, num_layers)
    if name in LANGUAGE or name in EXPERTS:
        return _language(name, num_layers)
    shape = stored_shape(name)
    text, block = _text(shape, num_layers), shape.vision[0]
    vision = {"depth": 32, "hidden_size": block.width, "intermediate_size": block.mlp_width,
              "num_heads": block.heads, "patch_size": 14, "out_hidden_size": shape.width, "spatial_merge_size": 2,
              "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
              "tokens_per_second": 2}
    text |= {"max_position_embeddings": 128000, "use_sliding_window": False, "rope_parameters": {
        "rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}}
    if num_layers:
        vision |= {"depth": num_layers, "fullatt_block_indexes": [num_layers - 1]}
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=shape.tied, image_token_id=151655,
        video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653)


@cache
def stored_shape(name: str) -> ModelShape:
    """As the package has it for users to name."""
    file = (TEXT | QWEN3 | GLM | INTERNVL | LANGUAGE | EXPERTS | HYBRID)[name]
    return ModelShape.load(CONF / "model_shape" / f"{file}.yaml")


def _text(shape: ModelShape, num_layers: int) -> dict[str, Any]:
    """What the language models of all families have in common."""
    layer = shape.language[0]
    experts = {"num_experts": layer.experts, "num_experts_per_tok": layer.experts_per_token,
               "moe_intermediate_size": layer.mlp_width} if layer.experts else {}
    if layer.shared_width:
        experts |= {"shared_expert_intermediate_size": layer.shared_width}
    else:
        experts |= {"intermediate_size": layer.mlp_width}
    return {"hidden_size": layer.width,
            "num_hidden_layers": num_layers or layer.count, "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.key_value_heads, "vocab_size": shape.vocabulary_size, "rms_norm_eps": 1e-6,
            **experts}


def _qwen3_vl(name: str, num_layers: int) -> Qwen3VLConfig | Qwen3VLMoeConfig:
    shape = stored_shape(name)
    block, num_deeper = shape.vision[0], shape.feature_levels - 1
    levels = [5, 11, 17] if block.count == 24 else [8, 16, 24]
    kind = Qwen3VLMoeConfig if name in EXPERTS else Qwen3VLConfig
    return kind(
        text_config=_text(shape, num_layers) | {
            "head_dim": shape.language[0].head_width, "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True,
                                "rope_theta": 5000000.0}},
        vision_config={
            "depth": num_layers or block.count, "hidden_size": block.width, "intermediate_size": block.mlp_width,
            "num_heads": block.heads, "out_hidden_size": shape.width, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "num_position_embeddings": shape.position_rows,
            "deepstack_visual_indexes": list(range(min(num_deeper, num_layers))) if num_layers else levels},
        tie_word_embeddings=shape.tied, image_token_id=151655, video_token_id=151656, vision_start_token_id=151652,
        vision_end_token_id=151653)


def _qwen3_5(name: str, num_layers: int) -> Qwen3_5Config | Qwen3_5MoeConfig:
    shape = stored_shape(name)
    (states, layer), block = shape.language, shape.vision[0]
    kind = Qwen3_5MoeConfig if states.experts else Qwen3_5Config
    return kind(
        text_config=_text(shape, num_layers) | {
            "num_hidden_layers": num_layers or states.count + layer.count, "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.key_value_heads, "head_dim": layer.head_width,
            "linear_num_value_heads": states.state_heads, "linear_num_key_heads": states.state_key_heads,
            "linear_value_head_dim": states.state_values, "linear_key_head_dim": states.state_keys,
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True,
                                "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}},
        vision_config={
            "depth": num_layers or block.count, "hidden_size": block.width, "intermediate_size": block.mlp_width,
            "num_heads": block.heads, "out_hidden_size": shape.width, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "num_position_embeddings": shape.position_rows},
        tie_word_embeddings=shape.tied, image_token_id=248056, video_token_id=248057, vision_start_token_id=248053,
        vision_end_token_id=248054)


def _glm(name: str, num_layers: int) -> Glm4vConfig:
    shape = stored_shape(name)
    block = shape.vision[0]
    return Glm4vConfig(
        text_config=_text(shape, num_layers) | {"max_position_embeddings": 65536, "pad_token_id": 151329,
                                                "rope_parameters": {
            "rope_type": "default", "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0}},
        vision_config={
            "depth": num_layers or block.count, "hidden_size": block.width, "num_heads": block.heads,
            "out_hidden_size": shape.width, "intermediate_size": shape.language[0].mlp_width,
            "patch_size": 14, "image_size": 336, "spatial_merge_size": 2, "temporal_patch_size": 2},
        tie_word_embeddings=shape.tied, image_token_id=151343, video_token_id=151344)


def _internvl(name: str, num_layers: int) -> InternVLConfig:
    shape = stored_shape(name)
    block = shape.vision[0]
    vision = {"hidden_size": block.width, "num_hidden_layers": num_layers or block.count,
              "num_attention_heads": block.heads, "intermediate_size": block.mlp_width,
              "use_qk_norm": block.query_key_norms, "attention_bias": block.layer_norms,
              "norm_type": "layer_norm" if block.layer_norms else "rms_norm"}
    text = _text(shape, num_layers) | {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000000.0}}
    return InternVLConfig(text_config=text, vision_config=vision, tie_word_embeddings=shape.tied)


def _language(name: str, num_layers: int) -> Qwen3Config | Qwen3MoeConfig | LlamaConfig:
    shape = stored_shape(name)
    text = _text(shape, num_layers) | {"head_dim": shape.language[0].head_width, "tie_word_embeddings": shape.tied}
    if shape.family == "llama":
        return LlamaConfig(**text, max_position_embeddings=8192, rope_parameters={
            "rope_type": "default", "rope_theta": 500000.0})
    kind = Qwen3MoeConfig if name in EXPERTS else Qwen3Config
    return kind(**text, max_position_embeddings=40960, rope_parameters={
        "rope_type": "default", "rope_theta": 1000000.0})


@cache
def shape_of(name: str, num_layers: int = 0) -> ModelShape:
    """What the planner knows of a published model."""
    config = published_config(name, num_layers)
    return meta_model(config).shape
