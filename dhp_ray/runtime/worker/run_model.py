"""The model of a run, built for a rank to train, and what is known of it without building it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dhp_ray.config import Config
from dhp_ray.data.families import preset_token_ids
from dhp_ray.model.build import adapter_sizes, build_model, model_shape, read_config
from dhp_ray.model.experts import BalanceLosses
from dhp_ray.model.fused import operators_of
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.model.lora import LoraSettings
from dhp_ray.model.weights import StoredWeights
from dhp_ray.planner.memory.model_shape import ModelShape


def token_ids(config: Config) -> dict[str, int] | None:
    """Return the special token ids that a preset is built with; None for a model folder, which has its own."""
    return preset_token_ids(config.model.preset) if config.model.preset else None


def build_adapter(config: Config) -> LanguageModel:
    """Build the model of a run: a preset with its initial weights, a folder without weights: the engine reads them."""
    adapter = build_model(config.model.preset, config.model.path, token_ids(config), config.seed)
    adapter.balance_losses = BalanceLosses(config.train.balance_loss, config.train.router_z_loss)
    adapter.freeze(config.train.freeze)
    if config.train.lora.rank:
        adapter.add_lora(lora_settings(config))
    if operators := operators_of(config.cluster.device):
        adapter.fuse(operators)
    return adapter


def untrained_weights(adapter: LanguageModel) -> StoredWeights | None:
    """Return the files of the parameters that are not trained; None if all are trained."""
    untrained = any(not parameter.requires_grad for parameter in adapter.module.parameters())
    return adapter.weights if untrained else None


def lora_settings(config: Config) -> LoraSettings:
    """Return the settings of the adapters that a run trains, if it trains any."""
    lora = config.train.lora
    return LoraSettings(lora.rank, lora.alpha, tuple(lora.targets), config.seed, lora.dropout)


class StateSize(NamedTuple):
    """Layers of the model, bytes of a checkpoint, the model's shape, and the parameters of its adapters by part."""

    num_layers: int
    checkpoint_bytes: int
    shape: ModelShape
    adapters: Mapping[str, int]


def state_size(config: Config) -> StateSize:
    """Return the size of the state of a run, without building its model (ValueError: the model cannot be had)."""
    shape = model_shape(config.model.preset, config.model.path, token_ids(config))
    adapters = {}
    if config.train.lora.rank:
        adapters = adapter_sizes(read_config(config.model.path), config.train.freeze, lora_settings(config))
    trained = sum(adapters.values()) or shape.num_parameters(without=config.train.freeze)
    return StateSize(shape.num_layers, trained * 3 * 4, shape, adapters)  # value and both moments, fp32
