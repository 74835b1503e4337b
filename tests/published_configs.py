"""The published configurations of Qwen2.5-VL (config.json of Qwen/Qwen2.5-VL-3B-Instruct and its larger siblings), of
Qwen3-VL (Qwen/Qwen3-VL-2B-Instruct) and of InternVL3 (OpenGVLab/InternVL3-1B-hf), and models of them without memory.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import InternVLConfig, PreTrainedConfig, Qwen2_5_VLConfig, Qwen3VLConfig

from dhp_ray.model.families import FAMILIES
from dhp_ray.model.families.base import VisionLanguageModel
from dhp_ray.planner.model_shape import ModelShape


def _text(width: int, mlp: int, layers: int, heads: int, key_values: int, vocabulary: int) -> dict[str, Any]:
    return {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": key_values, "vocab_size": vocabulary, "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6, "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}}


TEXT = {"3B": _text(2048, 11008, 36, 16, 2, 151936), "7B": _text(3584, 18944, 28, 28, 4, 152064),
        "32B": _text(5120, 27648, 64, 40, 8, 152064), "72B": _text(8192, 29568, 80, 64, 8, 152064)}
VISION_MLP = {"3B": 3420, "7B": 3420, "32B": 3456, "72B": 3456}
QWEN3 = {"Qwen3-VL-2B": (2048, 6144, 28, 16), "Qwen3-VL-4B": (2560, 9728, 36, 32), "Qwen3-VL-8B": (4096, 12288, 36, 32),
         "Qwen3-VL-32B": (5120, 25600, 64, 64)}
"""Width, MLP, layers and heads of the language model; the encoders of the smaller two are smaller."""
INTERNVL = {"InternVL3-1B": (896, 4864, 24, 14, 2), "InternVL3-8B": (3584, 18944, 28, 28, 4),
            "InternVL3-38B": (5120, 27648, 64, 40, 8)}
"""Width, MLP, layers, heads of the language model, and of keys and values. The largest has an encoder of 6 billion."""
NUM_PARAMETERS = {"3B": 3_754_622_976, "7B": 8_292_166_656, "32B": 33_452_718_336, "72B": 73_410_777_344,
                  "Qwen3-VL-2B": 2_127_532_032, "Qwen3-VL-4B": 4_437_815_808, "Qwen3-VL-8B": 8_767_123_696,
                  "Qwen3-VL-32B": 33_357_390_064, "InternVL3-1B": 938_193_024, "InternVL3-8B": 7_944_373_760,
                  "InternVL3-38B": 38_388_164_992}
"""As the model cards' safetensors have them."""


def published_config(name: str, num_layers: int = 0) -> PreTrainedConfig:
    """A published configuration; with `num_layers`, so many of the language model's and of the encoder's layers: of
    Qwen2.5-VL's encoder the last one with full attention, of Qwen3-VL's the first ones giving features."""
    if name in QWEN3:
        return _qwen3_vl(name, num_layers)
    if name in INTERNVL:
        return _internvl(name, num_layers)
    text = dict(TEXT[name])
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": VISION_MLP[name], "num_heads": 16,
              "patch_size": 14, "out_hidden_size": text["hidden_size"], "spatial_merge_size": 2,
              "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
              "tokens_per_second": 2}
    if num_layers:
        text["num_hidden_layers"] = num_layers
        vision |= {"depth": num_layers, "fullatt_block_indexes": [num_layers - 1]}
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=name == "3B", image_token_id=151655,
        video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653)


def _qwen3_vl(name: str, num_layers: int) -> Qwen3VLConfig:
    width, mlp, layers, heads = QWEN3[name]
    is_small = layers * width < 36 * 4096
    depth = 24 if is_small else 27
    levels = [5, 11, 17] if is_small else [8, 16, 24]
    return Qwen3VLConfig(
        text_config={
            "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": num_layers or layers,
            "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True,
                                "rope_theta": 5000000.0}},
        vision_config={
            "depth": num_layers or depth, "hidden_size": 1024 if is_small else 1152,
            "intermediate_size": 4096 if is_small else 4304, "num_heads": 16, "out_hidden_size": width,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": list(range(min(3, num_layers))) if num_layers else levels},
        tie_word_embeddings=is_small, image_token_id=151655, video_token_id=151656, vision_start_token_id=151652,
        vision_end_token_id=151653)


def _internvl(name: str, num_layers: int) -> InternVLConfig:
    width, mlp, layers, heads, key_values = INTERNVL[name]
    vision = ({"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12800,
               "use_qk_norm": True, "norm_type": "rms_norm"} if name == "InternVL3-38B" else
              {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
               "attention_bias": True})
    if num_layers:
        vision["num_hidden_layers"] = num_layers
    return InternVLConfig(
        text_config={"model_type": "qwen2", "hidden_size": width, "intermediate_size": mlp,
                     "num_hidden_layers": num_layers or layers, "num_attention_heads": heads,
                     "num_key_value_heads": key_values, "vocab_size": 151674, "max_position_embeddings": 32768,
                     "rms_norm_eps": 1e-6,
                     "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000000.0}},
        vision_config=vision, tie_word_embeddings=False)


def shape_of(name: str, num_layers: int = 0) -> ModelShape:
    """What the planner knows of a published model."""
    config = published_config(name, num_layers)
    return FAMILIES[config.model_type].shape(config)


def model_without_memory(config: PreTrainedConfig) -> VisionLanguageModel:
    """On the meta device; its tables of rotary frequencies are real."""
    family = FAMILIES[config.model_type]
    with torch.device("meta"):
        module = family.model_class(config)
    for name, holder in list(module.named_modules()):
        if next(holder.buffers(recurse=False), None) is not None:
            module.set_submodule(name, type(holder)(holder.config))
    return family(module)
