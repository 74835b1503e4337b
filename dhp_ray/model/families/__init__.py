"""The model families that can be trained, by the `model_type` of their configurations."""

from __future__ import annotations

from dhp_ray.model.families.glm4v import Glm4v
from dhp_ray.model.families.internvl import InternVL
from dhp_ray.model.families.llama import Llama
from dhp_ray.model.families.qwen2_5_vl import Qwen25VL
from dhp_ray.model.families.qwen3 import Qwen3, Qwen3Moe
from dhp_ray.model.families.qwen3_5 import Qwen35, Qwen35Moe
from dhp_ray.model.families.qwen3_vl import Qwen3VL, Qwen3VLMoe
from dhp_ray.model.language_model import LanguageModel

FAMILIES: dict[str, type[LanguageModel]] = {
    "glm4v": Glm4v, "internvl": InternVL, "llama": Llama, "qwen2_5_vl": Qwen25VL, "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe, "qwen3_5": Qwen35, "qwen3_5_moe": Qwen35Moe, "qwen3_vl": Qwen3VL, "qwen3_vl_moe": Qwen3VLMoe}
