"""What a measured file says of itself, and runs that it is not of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dhp_ray.planner import CostModel, PlanError
from dhp_ray.planner.cost.origin import CostFile, Origin, difference, origin_of_run
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from tests.published_configs import shape_of

SHAPE = shape_of("3B", 3)
CONSTANTS = {"quadratic_s": 2e-6, "linear_s": 1e-3, "comm_bytes_per_token": 100, "fixed_s": 0.5,
             "bandwidth_bytes_per_s": 1000}
SETTINGS = MemorySettings(sync="step", world_size=2, precision="fp32", recomputes=False)
ALL_SETTINGS = {"sync": ["step"], "precision": "fp32", "activation_checkpointing": False, "freeze": [], "lora": {}}
CPU = {"kind": "cpu", "name": "AMD EPYC", "count": 2, "threads": 1}


def origin(name: str = "tiny", device: dict[str, Any] | None = None, lora: dict[str, Any] | None = None,
           shape: Any = SHAPE, fused: bool = False, **settings: Any) -> Origin:
    return origin_of_run(MemoryModel(shape, replace(SETTINGS, **settings)), name, lora or {}, device or CPU, fused)


def written(path: Path, change: dict[str, Any]) -> Path:
    sections = origin().to_json() | {"versions": {"torch": "2.13.0"}, "measured": {"packs": 40},
                                     "intervals": {"linear_s": [9e-4, 1.1e-3]}, "errors": {"packs": {"median": 0.02}}}
    path.write_text(yaml.safe_dump(CONSTANTS | sections | change))
    return path


def test_a_file_gives_back_what_it_is_of(tmp_path: Path) -> None:
    found = CostFile.load(written(tmp_path / "cost.yaml", {}))
    assert found.cost == CostModel(**CONSTANTS) == CostModel.load(tmp_path / "cost.yaml")
    assert found.origin == origin()
    assert difference(origin(), origin()) == ""


def test_a_file_of_the_older_form_is_of_anything(tmp_path: Path) -> None:
    (tmp_path / "cost.yaml").write_text(yaml.safe_dump(CONSTANTS))
    assert CostFile.load(tmp_path / "cost.yaml") == CostFile(CostModel(**CONSTANTS), None)


@pytest.mark.parametrize(("run", "words"), [
    (origin("small", shape=replace(SHAPE, vocabulary_size=8)),
     "measured for model tiny, and this run trains small"),
    (origin(shape=replace(SHAPE, vocabulary_size=8)),
     "measured for model tiny, and this run trains tiny of another shape"),
    (origin(device={"kind": "cuda", "name": "NVIDIA H100", "count": 2}),
     "measured on cpu AMD EPYC, and this run is on cuda NVIDIA H100"),
    (origin(device=CPU | {"name": "Xeon"}), "measured on cpu AMD EPYC, and this run is on cpu Xeon"),
    (origin(device=CPU | {"threads": 4}),
     "measured on cpu AMD EPYC, and this run is on cpu AMD EPYC with 4 threads a rank"),
    (origin(sync="micro_batch"), "measured for planner.sync=step, and this run has planner.sync=micro_batch"),
    (origin(precision="bf16"), "measured for train.precision=fp32, and this run has train.precision=bf16"),
    (origin(recomputes=True),
     "measured for train.activation_checkpointing=false, and this run has train.activation_checkpointing=true"),
    (origin(frozen=("vision",)), r"measured for train.freeze=[], and this run has train.freeze=['vision']"),
    (origin(lora={"rank": 8}), "measured for train.lora={}, and this run has train.lora={'rank': 8}"),
    (origin(fused=True), "measured without fused operators, and this run has them")])
def test_another_run_is_told_apart_with_both_names(run: Origin, words: str) -> None:
    assert difference(origin(), run) == words


def test_a_file_that_does_not_tell_operators_apart_is_of_both() -> None:
    fused = origin(fused=True)
    assert difference(fused, origin()) == "measured with fused operators, and this run has none"
    older = replace(fused, settings={name: value for name, value in fused.settings.items()
                                     if name != "fused_operators"})
    assert difference(older, fused) == difference(older, origin()) == ""


def test_a_file_of_before_the_projector_was_told_apart_is_still_of_its_model() -> None:
    run = origin()
    numbers = {name: value for name, value in run.model["shape"].items() if name != "vision_projector"}
    older = replace(run, model={**run.model, "shape": {**numbers, "vision_one_row": 0}})
    assert difference(older, run) == ""
    assert difference(replace(older, model={**older.model, "shape": {**numbers, "vision_rest": 1}}), run)


def test_an_older_file_says_where_parameters_lay(tmp_path: Path) -> None:
    path = written(tmp_path / "cost.yaml", {"settings": ALL_SETTINGS | {"sharding": "whole"}})
    found = CostFile.load(path).origin
    assert found
    assert difference(found, origin()) == ""
    written(path, {"settings": ALL_SETTINGS | {"sharding": "node"}})
    with pytest.raises(PlanError, match=r"settings.sharding: got 'node', which no longer exists; allowed: whole, or"):
        CostFile.load(path)


def test_as_many_ranks_as_there_are() -> None:
    """Constants are a rank's; a run may grow and shrink."""
    assert difference(origin(), origin(device=CPU | {"count": 64}, world_size=64)) == ""


@pytest.mark.parametrize(("change", "message"), [
    ({"device": None}, "device: got None; allowed: a section"), ({"model": {"name": "tiny"}}, "model.shape: missing"),
    ({"model": {"name": "tiny", "shape": None}}, "model.shape: got None; allowed: the numbers of a model's shape"),
    ({"settings": {"sync": ["step"]}}, "settings.precision: missing"),
    ({"settings": ALL_SETTINGS | {"sync": "step"}}, "settings.sync: got 'step'; allowed: a list of step, micro_batch"),
    ({"settings": ALL_SETTINGS | {"sync": None}}, "settings.sync: got None; allowed: a list of step, micro_batch"),
    ({"linear_s": float("inf")}, "linear_s: got inf"), ({"quadratic_s": -1}, "quadratic_s: got -1"),
    ({"linear_s": "fast"}, "linear_s: got 'fast'")])
def test_nonsense_is_named_with_the_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "cost.yaml", change)
    with pytest.raises(PlanError) as caught:
        CostFile.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)
