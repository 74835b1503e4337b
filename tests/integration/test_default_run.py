"""What `make train` does: the synthetic set, then the embedded default on four workers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import yaml

from tests.integration.jobs import lines, losses, run, train


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "samples.parquet"
    ended = run("prepare_data.py", f"data.path={path}")
    assert ended.status == 0, ended.errors
    return path


def degrees(run_dir: Path) -> set[int]:
    return {int(degree) for line in lines(run_dir, "metrics.jsonl") for degree in line["degrees"]}


def test_the_default_run_begins_to_learn_on_groups_of_several_degrees(
    ray_cluster: None, synthetic: Path, tmp_path: Path
) -> None:
    ended = train(tmp_path / "run", f"data.path={synthetic}", "run.steps=12", "planner.sync=auto",
                  "train.activation_checkpointing=auto")
    assert losses(tmp_path / "run")[-1] < 0.8 * losses(tmp_path / "run")[0]
    assert {1, 2} < degrees(tmp_path / "run")
    # nothing is known of this machine as a device: what the defaults are, and said once
    assert ended.output.count("planner.sync=auto is step, train.activation_checkpointing=auto is false: ") == 1
    [event] = [line for line in lines(tmp_path / "run", "events.jsonl") if line["kind"] == "mode"]
    assert (event["sync"], event["activation_checkpointing"], event["generation"]) == ("step", "false", 1)
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (stored["planner"]["sync"], stored["train"]["activation_checkpointing"]) == ("step", "auto")
    assert json.loads((tmp_path / "run/plans/step_000001.json").read_text())["activation_checkpointing"] == "false"


@pytest.mark.slow
def test_the_default_run_learns(ray_cluster: None, synthetic: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", f"data.path={synthetic}", timeout_s=600)
    found = losses(tmp_path / "run")
    assert len(found) == 60
    assert mean(found[-5:]) < 0.6 * mean(found[:5])
    assert {1, 2} < degrees(tmp_path / "run")


@pytest.mark.slow
def test_real_conversations_are_learnt(ray_cluster: None, test_data: Path, tmp_path: Path) -> None:
    nlvr = test_data / "nlvr"
    train(tmp_path / "run", "data.format=llava", f"data.path={nlvr / 'conversations.json'}", f"data.image_root={nlvr}",
          "cluster.num_workers=3",
          "run.steps=60", "planner.tokens_per_rank=1024", timeout_s=900)
    found = losses(tmp_path / "run")
    assert len(found) == 60
    assert mean(found[-10:]) < 0.9 * mean(found[:10])
