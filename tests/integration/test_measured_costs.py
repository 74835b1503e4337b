"""Runs whose costs are measured before they begin, refitted as they go on, or of something else."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import yaml

from tests.integration.jobs import lines, refused, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

WRONG = {"name": "wrong", "communication": "ring", "estimated": True, "quadratic_s": 1e-6, "linear_s": 1e-3,
         "vision_linear_s": 6e-4, "pack_s": 0.1, "encoder_pass_s": 0.01, "comm_bytes_per_token": 4608,
         "latency_s": 2e-3, "fixed_s": 0.01, "bandwidth_bytes_per_s": 1e9}
"""Some twenty times what it takes on one core, and three times or more on cores that many others use."""
RUN = ("cluster.num_workers=2", "planner.tokens_per_rank=2048", "batch.global_samples=16", "checkpoint.every_steps=10")


def planned_costs(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(path.read_text())["inputs"]["cost"] for path in sorted((run_dir / "plans").iterdir())]


def test_wrong_costs_are_refitted_and_a_resumed_run_goes_on_with_them(common: list[str], tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(WRONG))
    words = [*common, *RUN, f"planner.cost={tmp_path / 'wrong.yaml'}"]
    train(tmp_path / "run", *words, "run.steps=20")
    errors = [line["cost_error"] for line in lines(tmp_path / "run", "metrics.jsonl")]
    assert statistics.median(errors[:2]) > 1.0
    assert statistics.median(errors[-6:]) < 0.5 * statistics.median(errors[:2])
    refits = [event for event in lines(tmp_path / "run", "events.jsonl") if event["kind"] == "refit"]
    assert refits
    for event in refits:
        assert event["error_after"] < event["error_before"]
        assert all(0.49 <= after / before <= 2.01 for before, after in event["terms"].values())
    costs = planned_costs(tmp_path / "run")
    assert costs[0]["linear_s"] == WRONG["linear_s"]
    # in force from the second step on that begins to be planned after it
    first = refits[0]
    for name, (before, after) in first["terms"].items():
        assert costs[first["step"]][name] == pytest.approx(before, rel=1e-3)
        assert costs[first["step"] + 1][name] == pytest.approx(after, rel=1e-3)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_000020" / "manifest.json").read_text())
    assert manifest["cost"]["prior"]["linear_s"] == WRONG["linear_s"]
    train(tmp_path / "run", *words, "run.steps=22")
    resumed = planned_costs(tmp_path / "run")[20]
    for name, value in manifest["cost"]["terms"].items():
        assert resumed[name] == pytest.approx(value)


def test_costs_that_are_not_to_be_refitted_stay(common: list[str], tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(WRONG))
    train(tmp_path / "run", *common, *RUN, f"planner.cost={tmp_path / 'wrong.yaml'}", "run.steps=6",
          "train.deterministic=true")
    assert {cost["linear_s"] for cost in planned_costs(tmp_path / "run")} == {WRONG["linear_s"]}
    assert not [event for event in lines(tmp_path / "run", "events.jsonl") if event["kind"] == "refit"]
    assert all("cost_error" in line for line in lines(tmp_path / "run", "metrics.jsonl"))


@pytest.mark.alone
@pytest.mark.timeout(900)
def test_costs_are_measured_before_the_first_step_and_kept(common: list[str], tmp_path: Path) -> None:
    words = [*common, *RUN, "planner.cost=measure", "planner.tokens_per_rank=1024"]
    first = train(tmp_path / "run", *words, "run.steps=8", timeout_s=600)
    assert "measuring costs on 2 workers" in first.output
    tree = yaml.safe_load((tmp_path / "run" / "cost.yaml").read_text())
    assert (tree["model"]["name"], tree["device"]["count"]) == ("tiny", 2)
    assert (tmp_path / "run" / "cost.png").exists()
    assert {cost["linear_s"] for cost in planned_costs(tmp_path / "run")} == {tree["linear_s"]}
    errors = [line["cost_error"] for line in lines(tmp_path / "run", "metrics.jsonl")]
    assert statistics.median(errors[3:]) < 0.5, "the first steps share their cores with what a run starts"
    again = train(tmp_path / "run", *words, "run.steps=10")
    assert "measuring costs" not in again.output
    assert {cost["linear_s"] for cost in planned_costs(tmp_path / "run")} == {tree["linear_s"]}
    tree["settings"]["precision"] = "bf16"
    (tmp_path / "run" / "cost.yaml").write_text(yaml.safe_dump(tree))
    line = refused(2, *common, *RUN, f"run.dir={tmp_path / 'other'}", "run.steps=1",
                   f"planner.cost={tmp_path / 'run' / 'cost.yaml'}")
    assert line == (f"error: planner.cost: {tmp_path / 'run' / 'cost.yaml'} was measured for train.precision=bf16, and "
                    "this run has train.precision=fp32; allowed: a file that jobs/measure.py wrote for such a run, "
                    "measure, or nothing")
