"""The model families whose text and pixels are supported, by the `model_type` of their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dhp_ray.data.errors import DataError
from dhp_ray.data.families.base import Family
from dhp_ray.data.families.internvl import InternVL
from dhp_ray.data.families.qwen2_5_vl import Qwen25VL
from dhp_ray.data.families.qwen3_vl import Qwen3VL
from dhp_ray.data.model_folder import check_byte_order_marks, check_tokenizer_files, image_settings_of, read_json
from dhp_ray.data.tokenizer import byte_tokenizer, special_token_ids
from dhp_ray.errors import first_line

FAMILIES: dict[str, Family] = {family.name: family for family in (InternVL(), Qwen25VL(), Qwen3VL())}
PRESETS = {"bytes": "qwen2_5_vl", "tiny": "qwen2_5_vl", "small": "qwen2_5_vl", "tiny_qwen3_vl": "qwen3_vl",
           "tiny_internvl": "internvl"}
"""The families of the presets in model/presets.py, and of the byte-level tokenizer alone (`bytes`)."""
PRESET_SETTINGS: dict[str, dict[str, Any]] = {"tiny_internvl": {"size": {"height": 56, "width": 56}}}
"""Settings in which a preset's image processor differs from its family's."""


def family_of(preset: str, path: str) -> Family:
    """The family of a preset, or of the model in a folder.

    Raises:
        DataError: the folder's config.json is missing or of another family.
    """
    if preset:
        return FAMILIES[PRESETS[preset]]
    file = Path(path) / "config.json"
    if not file.is_file():
        raise DataError(f"model.path: {path} has no config.json; allowed: a local Hugging Face folder")
    name = read_json(file).get("model_type")
    if name not in FAMILIES:
        raise DataError(f"model.path: {file} is of a model of type {name!r}; allowed: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def check_processor_files(folder: Path) -> None:
    """Refuse a folder that lacks a file from which the processor is made. Needs no transformers.

    Raises:
        DataError: tokenizer, chat template or image settings are missing, do not read as JSON, or are those of another
            family or model.
    """
    check_byte_order_marks(folder)
    check_tokenizer_files(folder)
    folder_image_settings(folder, family_of("", str(folder)))


def folder_image_settings(folder: Path, family: Family) -> dict[str, Any]:
    """The settings of a folder's image processor, including those of its model that determine the patches.

    Raises:
        DataError: there are none, or they cut other patches than the model takes.
    """
    try:
        of_model = {name: family.plain(name, value)
                    for name, value in family.of_model(read_json(folder / "config.json")).items()}
        found = image_settings_of(folder, family.image_processors, {**family.image_settings, **of_model})
        settings = {name: family.plain(name, value) for name, value in found.items()}
    except DataError:
        raise
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise DataError(f"model.path: {folder}: sizes of images and patches in config.json or preprocessor_config.json "
                        f"cannot be used: {first_line(error)}") from None
    for name, value in of_model.items():
        if settings[name] != value:
            raise DataError(f"model.path: {folder}: {name} is {settings[name]} in preprocessor_config.json, {value} in "
                            "config.json; allowed: the same")
    return settings


def preset_token_ids(preset: str) -> dict[str, int]:
    """Ids of a preset's special tokens, by purpose."""
    family = family_of(preset, "")
    return special_token_ids(byte_tokenizer(family.special_tokens), family.tokens)


def preset_image_settings(preset: str) -> dict[str, Any]:
    """The settings of a preset's image processor."""
    return {**family_of(preset, "").image_settings, **PRESET_SETTINGS.get(preset, {})}
