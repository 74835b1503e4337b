"""What `make train` does: the synthetic set, then the embedded default; the files that a run leaves. Its first steps
are those of `first_run` (conftest.py), on two workers; whole and on four, as it is, in make test-all.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import yaml

from tests.integration.jobs import FIRST_STEPS, FirstRun, lines, losses, train

METRICS = {"step", "loss", "learning_rate", "gradient_norm", "num_tokens", "num_samples", "step_time_s",
           "planning_time_s",
           "predicted_makespan_s", "measured_makespan_s", "idle_fraction", "num_ranks", "generation", "degrees",
           "planner", "late", "cost_error"}


def degrees(run_dir: Path) -> set[int]:
    return {int(degree) for line in lines(run_dir, "metrics.jsonl") for degree in line["degrees"]}


def test_the_default_run_begins_to_learn_on_groups_of_several_degrees(first_run: FirstRun) -> None:
    folder, ended = first_run.folder, first_run.ended
    assert losses(folder)[-1] < 0.8 * losses(folder)[0]
    assert degrees(folder) == {1, 2}
    # nothing is known of this machine as a device: what the defaults are, and said once
    assert ended.output.count("planner.sync=auto is step, train.activation_checkpointing=auto is false: ") == 1
    [event] = [line for line in lines(folder, "events.jsonl") if line["kind"] == "mode"]
    assert (event["sync"], event["activation_checkpointing"], event["generation"]) == ("step", "false", 1)
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    assert (stored["planner"]["sync"], stored["train"]["activation_checkpointing"]) == ("step", "auto")
    assert json.loads((folder / "plans/step_000001.json").read_text())["activation_checkpointing"] == "false"


def test_a_run_leaves_the_files_of_the_contract(first_run: FirstRun) -> None:
    folder = first_run.folder
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "tensorboard", "checkpoints", "plans", "events.jsonl", "model", "metrics.jsonl",
            "ledger.jsonl", "cluster.json"} <= names
    metrics = lines(folder, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, FIRST_STEPS + 1))
    # of steps with images encoded apart, and of those that are evaluated
    assert all(set(line) - {"encoder", "eval_loss"} == METRICS for line in metrics)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000008", "step_000009"]
    plans = {path.name for path in (folder / "plans").iterdir()}
    assert plans == {f"step_{step:06d}.json" for step in range(1, FIRST_STEPS + 1)}


def test_the_curves_are_read_back_by_tensorboard(first_run: FirstRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = first_run.folder
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"loss/train", "loss/learning_rate", "loss/gradient_norm", "throughput/tokens_per_s",
            "throughput/step_time_s", "plan/planning_time_s",
            "data/data_wait_s", "balance/predicted_makespan_s", "balance/measured_makespan_s", "balance/idle_fraction",
            "plan/degree_1", "elastic/num_ranks", "elastic/generation", "elastic/speed_0"} <= tags
    assert not any(tag.startswith("comm/") for tag in tags)  # no pool
    assert [picture.step for picture in events.Images("plan/planned_and_measured")] == [1, FIRST_STEPS]
    assert {"configuration", "cluster"} <= set(events.Tags()["tensors"])
    assert [point.value for point in events.Scalars("loss/train")] == pytest.approx(losses(folder), rel=1e-6)


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
