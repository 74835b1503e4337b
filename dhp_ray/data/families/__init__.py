"""The model families whose text and pixels are known, by the `model_type` of their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dhp_ray.data.errors import DataError
from dhp_ray.data.families.base import Family
from dhp_ray.data.families.qwen2_5_vl import Qwen25VL
from dhp_ray.data.families.qwen3_vl import Qwen3VL
from dhp_ray.data.model_folder import check_tokenizer_files, image_settings_of, read_json

FAMILIES: dict[str, Family] = {family.name: family for family in (Qwen25VL(), Qwen3VL())}
PRESETS = {"bytes": "qwen2_5_vl", "tiny": "qwen2_5_vl", "small": "qwen2_5_vl", "tiny_qwen3_vl": "qwen3_vl"}
"""The families of model/presets.py, and of the byte-level tokenizer alone."""


def family_of(preset: str, path: str) -> Family:
    """The family of a preset, or of the model in a folder.

    Raises:
        DataError: the folder's config.json is missing or of another family.
    """
    if preset:
        return FAMILIES[PRESETS[preset]]
    file = Path(path) / "config.json"
    name = read_json(file).get("model_type")
    if name not in FAMILIES:
        raise DataError(f"model.path: {file} is of a model of type {name!r}; allowed: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def check_processor_files(folder: Path) -> None:
    """Refuse a folder that lacks a file which the processor is made from. Needs no transformers.

    Raises:
        DataError: tokenizer, chat template or image settings are missing, or those of another family or model.
    """
    check_tokenizer_files(folder)
    folder_image_settings(folder, family_of("", str(folder)))


def folder_image_settings(folder: Path, family: Family) -> dict[str, Any]:
    """The settings of a folder's image processor.

    Raises:
        DataError: there are none, or they cut other patches than the model takes.
    """
    settings = image_settings_of(folder, family.image_processors, family.image_settings)
    vision = read_json(folder / "config.json").get("vision_config") or {}
    for name, of_model in family.sizes.items():
        if vision.get(of_model, settings[name]) != settings[name]:
            raise DataError(f"model.path: {folder}: its image processor has {name} {settings[name]}, its model's "
                            f"{of_model} is {vision[of_model]}; allowed: the same")
    return settings
