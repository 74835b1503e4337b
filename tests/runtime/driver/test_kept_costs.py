"""Costs that an earlier start left in the run folder, for groups of described workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dhp_ray.planner import CostModel
from dhp_ray.planner.cost.origin import CostFile
from dhp_ray.planner.mode import Mode
from dhp_ray.runtime.driver.start import cost_notice, kept_cost
from dhp_ray.storage import Folder
from tests.runtime.driver.groups import config_of, group_of, strategy_of

COST = CostModel(4e-8, 5e-5, 4608, 0.01, {2: 1e9}, pack_s=5e-3)
STEP = Mode("step")


def test_costs_of_this_run_are_used_again(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), "planner.cost=measure")
    group, folder = group_of(2, 8.0, config), Folder(str(tmp_path))
    assert kept_cost(folder, strategy_of(config, group), STEP) == (None, "")
    origin = strategy_of(config, group).origin(STEP)
    (tmp_path / "cost.yaml").write_text(yaml.safe_dump(COST.to_json() | origin.to_json()))
    found, reason = kept_cost(folder, strategy_of(config, group), STEP)
    assert found is not None
    assert (found.cost.linear_s, reason) == (COST.linear_s, "")
    other = replace(origin, device=dict(origin.device) | {"name": "NVIDIA L40S"})
    (tmp_path / "cost.yaml").write_text(yaml.safe_dump(COST.to_json() | other.to_json()))
    assert kept_cost(folder, strategy_of(config, group), STEP) == (
        None, "measured on cuda NVIDIA L40S, and this run is on cuda NVIDIA H100 80GB HBM3")


def test_a_run_that_goes_on_without_measured_costs_says_so() -> None:
    """Its driver may have been lost while they were measured."""
    kept = CostFile(COST, None)
    assert [cost_notice(kept, "", takes_over) for takes_over in (False, True)] == ["", ""]
    assert cost_notice(None, "", False) == ""  # the first start
    assert cost_notice(None, "of others", False) == "cost.yaml is not used, costs are measured again: of others"
    for reason, told in (("of others", "of others"), ("", "the driver was lost before it was written")):
        assert cost_notice(None, reason, True) == (
            f"cost.yaml is not used: {told}; the run goes on without measured costs, and its next start measures them")


@pytest.mark.parametrize(("text", "reason"), [
    ("", "not a mapping from names to values"),
    ("linear_s: [\n", "not YAML: "), ("linear_s: -1\n", "quadratic_s: missing"),
    (yaml.safe_dump(COST.to_json()), "it does not say what it was measured on")])
def test_a_damaged_file_is_a_reason_to_measure_again(tmp_path: Path, text: str, reason: str) -> None:
    config = config_of(str(tmp_path), "planner.cost=measure")
    (tmp_path / "cost.yaml").write_text(text)
    found, said = kept_cost(Folder(str(tmp_path)), strategy_of(config, group_of(2, 8.0, config)), STEP)
    assert found is None
    assert said.startswith(reason)
    assert "\n" not in said
