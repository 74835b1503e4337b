"""The published configurations of Qwen2.5-VL (config.json of Qwen/Qwen2.5-VL-3B-Instruct and its larger siblings), and
models of them without memory.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2_5_VLConfig

from dhp_ray.model.families.qwen2_5_vl import Qwen25VL


def _text(width: int, mlp: int, layers: int, heads: int, key_values: int, vocabulary: int) -> dict[str, Any]:
    return {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": key_values, "vocab_size": vocabulary, "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6, "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}}


TEXT = {"3B": _text(2048, 11008, 36, 16, 2, 151936), "7B": _text(3584, 18944, 28, 28, 4, 152064),
        "32B": _text(5120, 27648, 64, 40, 8, 152064), "72B": _text(8192, 29568, 80, 64, 8, 152064)}
VISION_MLP = {"3B": 3420, "7B": 3420, "32B": 3456, "72B": 3456}
NUM_PARAMETERS = {"3B": 3_754_622_976, "7B": 8_292_166_656, "32B": 33_452_718_336, "72B": 73_410_777_344}
"""As the model cards' safetensors have them."""


def published_config(name: str, num_layers: int = 0) -> Qwen2_5_VLConfig:
    """A published configuration; with `num_layers`, so many of the language model's and of the encoder's layers, the
    encoder's last one with full attention."""
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


def model_without_memory(config: Qwen2_5_VLConfig) -> Qwen25VL:
    """On the meta device; its tables of rotary frequencies are real."""
    with torch.device("meta"):
        module = Qwen25VL.model_class(config)
    for name, holder in list(module.named_modules()):
        if next(holder.buffers(recurse=False), None) is not None:
            module.set_submodule(name, type(holder)(holder.config))
    return Qwen25VL(module)
