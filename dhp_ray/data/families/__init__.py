"""The model families whose text and pixels are supported, by the `model_type` of their configurations."""

from __future__ import annotations

from typing import Any

from dhp_ray.data.families.base import Family
from dhp_ray.data.families.glm4v import Glm4vFamily
from dhp_ray.data.families.internvl import InternVLFamily
from dhp_ray.data.families.llama import LlamaFamily
from dhp_ray.data.families.qwen2_5_vl import Qwen25VLFamily
from dhp_ray.data.families.qwen3 import Qwen3Family, Qwen3MoeFamily
from dhp_ray.data.families.qwen3_vl import Qwen3VLFamily, Qwen3VLMoeFamily, Qwen35Family, Qwen35MoeFamily

FAMILIES: dict[str, type[Family]] = {
    family.name: family for family in (
        Glm4vFamily, InternVLFamily, LlamaFamily, Qwen25VLFamily, Qwen3Family, Qwen35Family, Qwen35MoeFamily,
        Qwen3MoeFamily, Qwen3VLFamily, Qwen3VLMoeFamily)}
PRESETS: dict[str, type[Family]] = {
    "tiny": Qwen25VLFamily, "small": Qwen25VLFamily, "tiny_glm4v": Glm4vFamily,
    "tiny_internvl": InternVLFamily, "tiny_llama": LlamaFamily, "tiny_qwen3": Qwen3Family,
    "tiny_qwen3_moe": Qwen3MoeFamily, "tiny_qwen3_5": Qwen35Family, "tiny_qwen3_5_moe": Qwen35MoeFamily,
    "tiny_qwen3_vl": Qwen3VLFamily, "tiny_qwen3_vl_moe": Qwen3VLMoeFamily}
"""The families of the presets in model/presets.py."""
PRESET_SETTINGS: dict[str, dict[str, Any]] = {"tiny_internvl": {"size": {"height": 56, "width": 56}}}
"""Settings in which a preset's image processor differs from its family's."""


def preset_token_ids(preset: str) -> dict[str, int]:
    """Ids of a preset's special tokens, by purpose."""
    family = PRESETS[preset]
    return family.token_ids(family.byte_tokenizer())
