"""Builds a model from a preset or a local Hugging Face folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from dhp_ray.model.families import FAMILIES
from dhp_ray.model.files import CONFIG_FILE, GENERATION_FILE, ModelError, config_tree, weight_files
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.lora import LoraSettings
from dhp_ray.model.presets import preset_config
from dhp_ray.model.weights import StoredWeights
from dhp_ray.planner.memory.model_shape import ModelShape


def build_model(preset: str, path: str, token_ids: Mapping[str, int] | None, seed: int) -> LanguageModel:
    """Build the model of a preset or of a local folder.

    A preset gives a model in fp32 on the CPU, with the same weights on every rank. A folder gives a model on the meta
    device, whose `weights` read any part of its parameters from the files. `token_ids` are the special token ids of the
    preset's tokenizer, by name: bos, eos, and of a model with an encoder also image, video, vision_start, vision_end. A
    folder needs config.json and safetensors; nothing is downloaded, and no code in the folder is run.

    Raises:
        ModelError: one line on what is missing or not supported.
    """
    quieten()
    if preset:
        config = preset_config(preset, token_ids)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _family(config)(_family(config).model_class(config))
    module, weights = without_weights(path)
    adapter = _family(module.config)(module)
    adapter.weights = weights
    return adapter


def without_weights(path: str) -> tuple[PreTrainedModel, StoredWeights]:
    """The transformers model of a folder on the meta device, and a reader for any part of its parameters."""
    config, files = read_config(path), weight_files(path)
    module = _meta_module(config)
    module.generation_config = _generation_config(path)
    return module, StoredWeights(path, files, module, _family(config).stored_names)


def model_shape(preset: str, path: str, token_ids: Mapping[str, int] | None) -> ModelShape:
    """The shape of the model that `build_model` would build, from its configuration only."""
    return meta_model(preset_config(preset, token_ids) if preset else read_config(path)).shape


def meta_model(config: PreTrainedConfig) -> LanguageModel:
    """The model of a configuration on the meta device: it has parameters to count, and no values."""
    _family(config).check(config)
    return _family(config)(_meta_module(config))


def _meta_module(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        module = _family(config).model_class(config)
    for name, holder in list(module.named_modules()):
        if next(holder.buffers(recurse=False), None) is not None:
            module.set_submodule(name, type(holder)(holder.config))  # tables of rotary frequencies, which no file holds
    return module


def adapter_sizes(config: PreTrainedConfig, frozen: Sequence[str], settings: LoraSettings) -> dict[str, int]:
    """Number of adapter parameters of a model with this configuration, for each part ("vision", "language") with
    adapters; those of "experts" apart from the rest of "language".

    Raises:
        ModelError: a target names no layer, or the model cannot be trained.
    """
    adapter = meta_model(config)
    adapter.freeze(frozen)
    adapter.add_lora(settings)
    sizes = Counter[str]()
    of_experts = {parameter for experts in adapter.experts() for parameter in experts.parameters()}
    for name, parameter in adapter.module.named_parameters():
        if parameter.requires_grad:
            sizes["vision" if adapter.is_vision(name) else "language"] += (
                0 if parameter in of_experts else parameter.numel())
            sizes["experts"] += parameter.numel() * (parameter in of_experts)
    if not sizes["experts"]:
        del sizes["experts"]
    return dict(sizes)


def read_config(path: str) -> PreTrainedConfig:
    """The configuration in a Hugging Face folder."""
    tree = config_tree(path)
    name = tree["model_type"]
    with _checked(Path(path) / CONFIG_FILE, f"configuration of a {name} model"):
        config: PreTrainedConfig = FAMILIES[name].config_class.from_dict(tree)
    return config


def _generation_config(path: str) -> GenerationConfig:
    """The settings for generation in a Hugging Face folder: without a file of their own those in config.json, which a
    model's configuration drops.
    """
    name, options = GENERATION_FILE, dict[str, Any]()
    if not (Path(path) / name).is_file():
        name, options = CONFIG_FILE, {"_from_model_config": True}
    with _checked(Path(path) / name, "generation configuration"):
        return GenerationConfig.from_pretrained(path, name, local_files_only=True, **options)


@contextmanager
def _checked(file: Path, what: str) -> Iterator[None]:
    """Name the file whose values transformers refuses, with errors of many kinds."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"model.path: {file} is no {what}: {' '.join(str(error).split())[:300]}") from None


def quieten() -> None:
    """Silence transformers' progress bars and reports, one for each rank. Errors are raised as one line."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _family(config: PreTrainedConfig) -> type[LanguageModel]:
    return FAMILIES[config.model_type]
