"""The shape that a model's adapter gives the planner, held against the module itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from dhp_ray.model.build import meta_model
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner import PlanError
from dhp_ray.planner.memory.model_shape import ModelShape
from tests.packs import PRESETS, config_of_preset
from tests.published_configs import CONF, HYBRID, NUM_PARAMETERS, published_config, shape_of, stored_shape


def config_of(name: str) -> PreTrainedConfig:
    return published_config(name) if name in NUM_PARAMETERS else config_of_preset(name)


def counted(adapter: LanguageModel) -> Counter[tuple[str, str, int]]:
    """How many units of each (part, name, parameters) the module has: a parameter belongs to its innermost unit."""
    taken, found, rest = set(), Counter[tuple[str, str, int]](), Counter[str]()
    names = {parameter: name for name, parameter in adapter.module.named_parameters()}
    for unit in [*adapter.units(), adapter.module]:
        own = [parameter for parameter in unit.parameters() if parameter not in taken]
        taken.update(own)
        part = "vision" if adapter.is_vision(names[own[0]]) else "language"
        kind = ("layer" if "Layer" in type(unit).__name__ or "Block" in type(unit).__name__
                else "projector" if "Projector" in type(unit).__name__ else "head" if unit is adapter.head else "rest")
        if kind != "rest":
            found[part, kind, sum(parameter.numel() for parameter in own)] += 1
        else:
            rest[part] += sum(parameter.numel() for parameter in own)
    return found + Counter({(part, "rest", count): 1 for part, count in rest.items()})


@pytest.mark.parametrize("name", ["small", *PRESETS, *NUM_PARAMETERS])
def test_parameters_of_every_part_and_unit_are_the_modules(name: str) -> None:
    config = config_of(name)
    adapter = meta_model(config)
    shape = adapter.shape
    units: Counter[tuple[str, str, int]] = Counter()
    for unit in shape.units():
        units[unit.part, unit.name, unit.num_parameters] += unit.count
    assert units == counted(adapter)
    sizes = {part: sum(parameter.numel() for name, parameter in adapter.module.named_parameters()
                       if adapter.is_vision(name) == (part == "vision")) for part in ("vision", "language")}
    assert shape.num_parameters() == sum(sizes.values())
    assert shape.num_parameters(without=["vision"]) == sizes["language"]
    assert shape.num_parameters(without=["language"]) == sizes["vision"]
    assert (shape.vocabulary_size, shape.merge_area, shape.patch_dim,
            shape.width * shape.feature_levels) == (
        adapter.vocabulary_size, adapter.merge_area, adapter.patch_dim, adapter.feature_width)


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_published_models_have_as_many_parameters_as_their_files(name: str) -> None:
    assert shape_of(name).num_parameters() == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", [*NUM_PARAMETERS, *HYBRID])
def test_the_shapes_that_users_may_name_are_those_of_the_models(name: str) -> None:
    assert stored_shape(name) == shape_of(name)


@pytest.mark.parametrize("file", sorted((CONF / "model_shape").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_files_are_as_a_shape_writes_them(file: Path) -> None:
    comment, _, text = file.read_text().partition("\n")
    assert comment.startswith("# ")
    assert ModelShape.load(file).text() == text


@pytest.mark.parametrize(("line", "words"), [
    ("family: qwen2_5_vl", "family: got 3; allowed: a name"), ("tied: false", "tied: got 3; allowed: true or false"),
    ("merge_area: 4", "merge_area: missing"), ("patch_dim: 1176", "patch_dims: no such key; allowed: family, "),
    ("language_rest: 3584", "language_rest: got -3584; allowed: a whole number of at least 0"),
    ("- {count: 28, width: 3584, ", "language[0].count: missing")])
def test_a_wrong_shape_is_one_line(tmp_path: Path, line: str, words: str) -> None:
    changed = {"family: qwen2_5_vl": "family: 3", "tied: false": "tied: 3", "merge_area: 4": "",
               "patch_dim: 1176": "patch_dims: 1176", "language_rest: 3584": "language_rest: -3584",
               "- {count: 28, width: 3584, ": "- {width: 3584, "}[line]
    file = tmp_path / "shape.yaml"
    file.write_text((CONF / "model_shape" / "qwen2_5_vl_7b.yaml").read_text().replace(line, changed))
    with pytest.raises(PlanError) as raised:
        ModelShape.load(file)
    assert str(raised.value).startswith(f"{file}: {words}")
    assert "\n" not in str(raised.value)
    with pytest.raises(PlanError, match="cannot be read: FileNotFoundError"):
        ModelShape.load(tmp_path / "none.yaml")


def test_layers_by_kind() -> None:
    shape = shape_of("7B")
    assert [(layer.count, layer.heads, layer.key_value_heads, layer.head_width, layer.window)
            for layer in shape.language] == [(28, 28, 4, 128, 0)]
    assert shape.token_pixels == 28 * 28
    assert [(layer.count, layer.heads, layer.head_width, layer.window) for layer in shape.vision] == [
        (28, 16, 80, 64), (4, 16, 80, 0)]
