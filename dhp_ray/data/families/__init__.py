"""The model families whose text and pixels are supported, by the `model_type` of their configurations."""

from __future__ import annotations

from typing import Any

from dhp_ray.data.families.base import Family
from dhp_ray.data.families.internvl import InternVL
from dhp_ray.data.families.qwen2_5_vl import Qwen25VL
from dhp_ray.data.families.qwen3_vl import Qwen3VL

FAMILIES: dict[str, type[Family]] = {family.name: family for family in (InternVL, Qwen25VL, Qwen3VL)}
PRESETS: dict[str, type[Family]] = {"bytes": Qwen25VL, "tiny": Qwen25VL, "small": Qwen25VL, "tiny_qwen3_vl": Qwen3VL,
                                    "tiny_internvl": InternVL}
"""The families of the presets in model/presets.py, and of the byte-level tokenizer alone (`bytes`)."""
PRESET_SETTINGS: dict[str, dict[str, Any]] = {"tiny_internvl": {"size": {"height": 56, "width": 56}}}
"""Settings in which a preset's image processor differs from its family's."""


def preset_token_ids(preset: str) -> dict[str, int]:
    """Ids of a preset's special tokens, by purpose."""
    family = PRESETS[preset]
    return family.token_ids(family.byte_tokenizer())
