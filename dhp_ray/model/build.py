"""Builds a model from a preset or a local Hugging Face folder: the families that there are, by their config's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from dhp_ray.errors import first_line
from dhp_ray.model.adapter import ModelAdapter
from dhp_ray.model.files import ModelError, config_tree, weight_files
from dhp_ray.model.presets import preset_config
from dhp_ray.model.qwen2_5_vl import Qwen25VL
from dhp_ray.model.weights import StoredWeights
from dhp_ray.planner.model_shape import ModelShape

FAMILIES: dict[str, Any] = {"qwen2_5_vl": Qwen25VL}


def build_model(preset: str, path: str, token_ids: Mapping[str, int] | None, seed: int) -> ModelAdapter:
    """The model in fp32 on the CPU: of a preset, with weights that are the same on every rank, or of a local folder.

    `token_ids` are the special token ids of the preset's tokenizer, by name: image, video, vision_start, vision_end,
    bos, eos, pad. A folder needs config.json and safetensors; nothing is fetched and no code in it is run.

    Raises:
        ModelError: one line on what is missing or not supported.
    """
    _quieten()
    if preset:
        config = preset_config(preset, token_ids)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            family = _family(config)
            adapter: ModelAdapter = family(family.model_class(config))
            return adapter
    family = _family(read_config(path))
    weight_files(path)
    loaded: ModelAdapter = family(_load(family.model_class, path))
    return loaded


def build_on_meta_device(path: str) -> ModelAdapter:
    """Build the model of a local folder on the meta device; its `weights` read any rows of the parameters from the
    files.

    Raises:
        ModelError: one line on what is missing or not supported.
    """
    _quieten()
    config = read_config(path)
    family = _family(config)
    files = weight_files(path)
    with torch.device("meta"):
        module = family.model_class(config)
    for name, holder in list(module.named_modules()):
        if next(holder.buffers(recurse=False), None) is not None:
            module.set_submodule(name, type(holder)(holder.config))  # tables of rotary frequencies, which no file holds
    if (Path(path) / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    adapter: ModelAdapter = family(module)
    adapter.weights = StoredWeights(path, files, module, family.stored_names)
    return adapter


def model_shape(preset: str, path: str, token_ids: Mapping[str, int] | None) -> ModelShape:
    """The shape of the model that `build_model` would build, from its configuration alone."""
    config = preset_config(preset, token_ids) if preset else read_config(path)
    shape: ModelShape = _family(config).shape(config)
    return shape


def read_config(path: str) -> PreTrainedConfig:
    """The configuration in a Hugging Face folder."""
    tree = config_tree(path)
    name = tree["model_type"]
    try:
        config: PreTrainedConfig = FAMILIES[name].config_class.from_dict(tree)
    except Exception as error:  # transformers' checks of values raise errors of many kinds
        said = " ".join(str(error).split())[:300]
        raise ModelError(
            f"model.path: {Path(path) / 'config.json'} is no configuration of a {name} model: {said}"
        ) from None
    return config


def _quieten() -> None:
    """Every rank would show its own bars and reports of what it reads and writes; what is wrong is raised as one line.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _family(config: PreTrainedConfig) -> Any:
    return FAMILIES[config.model_type]


def _load(model_class: Any, path: str) -> PreTrainedModel:
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False,
                               "dtype": torch.float32}
    try:
        module, report = model_class.from_pretrained(path, output_loading_info=True, **options)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelError(f"model.path: {path} cannot be loaded: {first_line(error)}") from error
    # transformers fills what it does not find with random numbers and says so in a log line only
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"model.path: {path} lacks {len(missing)} weights, the first is {missing[0]}")
    loaded: PreTrainedModel = module
    return loaded
