"""The shape that a model's adapter gives the planner, held against the module itself."""

from __future__ import annotations

from collections import Counter

import pytest
from transformers import PreTrainedConfig

from dhp_ray.model.families import FAMILIES
from dhp_ray.model.families.base import VisionLanguageModel
from dhp_ray.model.presets import preset_config
from tests.packs import TOKEN_IDS
from tests.published_configs import NUM_PARAMETERS, model_without_memory, published_config, shape_of


def config_of(name: str) -> PreTrainedConfig:
    return published_config(name) if name in NUM_PARAMETERS else preset_config(name, TOKEN_IDS)


def counted(adapter: VisionLanguageModel) -> Counter[tuple[str, str, int]]:
    """How many units of each (part, name, parameters) the module has: a parameter belongs to its innermost unit."""
    taken, found, rest = set(), Counter[tuple[str, str, int]](), Counter[str]()
    names = {parameter: name for name, parameter in adapter.module.named_parameters()}
    for unit in [*adapter.units(), adapter.module]:
        own = [parameter for parameter in unit.parameters() if parameter not in taken]
        taken.update(own)
        part = "vision" if adapter.is_vision(names[own[0]]) else "language"
        kind = "layer" if "Layer" in type(unit).__name__ or "Block" in type(unit).__name__ else "rest"
        if kind == "layer":
            found[part, kind, sum(parameter.numel() for parameter in own)] += 1
        else:
            rest[part] += sum(parameter.numel() for parameter in own)
    return found + Counter({(part, "rest", count): 1 for part, count in rest.items()})


@pytest.mark.parametrize("name", ["tiny", "small", "tiny_qwen3_vl", "tiny_internvl", *NUM_PARAMETERS])
def test_parameters_of_every_part_and_unit_are_the_modules(name: str) -> None:
    config = config_of(name)
    shape, adapter = FAMILIES[config.model_type].shape(config), model_without_memory(config)
    units: Counter[tuple[str, str, int]] = Counter()
    for unit in shape.units():
        units[unit.part, unit.name, unit.num_parameters] += unit.count
    assert units == counted(adapter)
    sizes = {part: sum(parameter.numel() for name, parameter in adapter.module.named_parameters()
                       if adapter.is_vision(name) == (part == "vision")) for part in ("vision", "language")}
    assert shape.parameters_by_part() == sizes
    assert shape.num_parameters() == sum(sizes.values())
    assert shape.num_parameters(without=["vision"]) == sizes["language"]
    assert (shape.vocabulary_size, shape.merge_area, shape.patch_dim,
            shape.width * shape.feature_levels) == (
        adapter.vocabulary_size, adapter.merge_area, adapter.patch_dim, adapter.feature_width)


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_published_models_have_as_many_parameters_as_their_files(name: str) -> None:
    assert shape_of(name).num_parameters() == NUM_PARAMETERS[name]


def test_layers_by_kind() -> None:
    shape = shape_of("7B")
    assert [(layer.count, layer.heads, layer.key_value_heads, layer.head_width, layer.window)
            for layer in shape.language] == [(28, 28, 4, 128, 0)]
    assert shape.token_pixels == 28 * 28
    assert [(layer.count, layer.heads, layer.head_width, layer.window) for layer in shape.vision] == [
        (28, 16, 80, 64), (4, 16, 80, 0)]
