"""The model families that can be trained, by the `model_type` of their configurations."""

from __future__ import annotations

from dhp_ray.model.families.internvl import InternVL
from dhp_ray.model.families.qwen2_5_vl import Qwen25VL
from dhp_ray.model.families.qwen3_vl import Qwen3VL
from dhp_ray.model.vision_language_model import VisionLanguageModel

FAMILIES: dict[str, type[VisionLanguageModel]] = {
    "internvl": InternVL, "qwen2_5_vl": Qwen25VL, "qwen3_vl": Qwen3VL}
