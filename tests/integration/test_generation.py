"""Answers generated while a run trains: in every mode those that `jobs/evaluate.py` then gets of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.samples import picture, talk, write_rows
from tests.integration.faults import Start, call_of, kill
from tests.integration.jobs import Ended, lines, refused, run, train
from tests.plain_answers import model_folder

NUM_TOKENS = 6
SCORES = {"eval_exact_match": "exact_match", "eval_anls": "anls", "eval_f1": "f1"}


@pytest.fixture(scope="module")
def conversations(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Training and held-out conversations, apart."""
    folder = tmp_path_factory.mktemp("split")
    rows = [row for row in json.loads((test_data / "nlvr" / "conversations.json").read_text())
            if isinstance(row["image"], str) or len(row["image"]) < 3]
    held_out: list[dict[str, Any]] = [row | {"answers": ["yes"]} for row in rows[30:41]]
    held_out[3]["image"] = ["images/none.png"]
    (folder / "train.json").write_text(json.dumps(rows[:24]))
    (folder / "held_out.json").write_text(json.dumps(held_out))
    return ["data=llava", f"data.path={folder / 'train.json'}", f"data.image_root={test_data / 'nlvr'}",
            "data.max_pixels=20000", f"eval.path={folder / 'held_out.json'}", "eval.every_steps=20",
            "eval.generate=true", f"eval.max_new_tokens={NUM_TOKENS}", "batch.global_samples=4", "run.steps=40",
            "train.learning_rate=3e-3", "checkpoint.every_steps=0", "planner.max_sequence_tokens=1024"]


def evaluated(folder: Path, conversations: list[str]) -> dict[str, Any]:
    """What `jobs/evaluate.py` says of the model that a run has left."""
    same = [word for word in conversations if word.startswith(("data.image", "data.max", "eval.path", "eval.max"))]
    ended = run("evaluate.py", f"model.path={folder / 'model'}", *same, f"eval.output={folder / 'predictions.jsonl'}",
                "cluster.num_workers=2", "cluster.cpus_per_worker=0.2")
    assert ended.status == 0, ended.output + ended.errors
    found: dict[str, Any] = json.loads(ended.output.splitlines()[-1])
    return found


def check(folder: Path, ended: Ended, conversations: list[str]) -> dict[str, float]:
    """The last step's metrics are those of the model that it left."""
    metrics = lines(folder, "metrics.jsonl")
    assert [line["step"] for line in metrics if "eval_f1" in line] == [20, 40]
    wanted = evaluated(folder, conversations)
    assert (wanted["num_samples"], wanted["num_left_out"]) == (10, 1)
    assert metrics[-1]["eval_loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    for name, own in SCORES.items():
        assert metrics[-1][name] == pytest.approx(wanted[own]), name
    assert ended.output.count("F1 ") == 2
    assert ended.output.count("left out: image 1: images/none.png") == 1
    return {name: metrics[-1][name] for name in SCORES}


@pytest.mark.slow
def test_scores_are_those_of_the_model_that_is_left(
    ray_cluster: None, conversations: list[str], tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = train(tmp_path / "run", *conversations, "cluster.num_workers=2", "planner.tokens_per_rank=512")
    scores = check(tmp_path / "run", ended, conversations)
    assert scores["eval_f1"] > 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("eval/f1")][-1] == (
        40, pytest.approx(scores["eval_f1"]))


@pytest.mark.slow
def test_without_any_answer_there_are_no_scores(ray_cluster: None, conversations: list[str], tmp_path: Path) -> None:
    """One row has nothing that an answer could be compared with, the other an image that cannot be decoded."""
    write_rows(tmp_path / "held_out.json", [
        {"id": "a", "conversations": talk("Name a colour.", "Red."), "answers": 3},
        {"id": "b", "conversations": talk("<image>What?", "Red."), "image": "cut.png"}])
    whole = picture(60, 90)
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    path = write_rows(tmp_path / "train.json", [{"conversations": talk("Name a colour.", "Red.")}] * 4)
    ended = train(tmp_path / "run", *conversations, f"eval.path={tmp_path / 'held_out.json'}",
                  f"data.image_root={tmp_path}", f"data.path={path}", "eval.every_steps=1",
                  "run.steps=1", "cluster.num_workers=1", "planner.tokens_per_rank=1024")
    [line] = lines(tmp_path / "run", "metrics.jsonl")
    assert line["eval_loss"] > 0
    assert not SCORES.keys() & line.keys()
    assert "no scores of answers after step 1: no held-out sample can be answered" in ended.output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", [["planner.sync=micro_batch"], ["comm.transport=parent"]], ids=str)
@pytest.mark.parametrize("preset", ["tiny_qwen3_vl", "tiny_internvl"])
def test_scores_in_other_modes_and_families(
    preset: str, settings: list[str], ray_cluster: None, conversations: list[str], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "given", preset)
    ended = train(tmp_path / "run", *conversations, *settings, "model.preset=", f"model.path={folder}",
                  "cluster.num_workers=3", "planner.tokens_per_rank=342")
    check(tmp_path / "run", ended, conversations)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_a_worker_may_die_while_answers_are_generated(
    sync: str, ray_cluster: None, conversations: list[str], start: Start
) -> None:
    """It is killed while it runs the call that answers."""
    begun = start(*conversations, "eval.every_steps=1", "run.steps=6", f"planner.sync={sync}",
                  "planner.tokens_per_rank=512", "cluster.cpus_per_worker=0.2")
    begun.wait_for_step(2)
    victim = begun.pids[1]
    begun.wait_for(lambda: call_of(victim) == "answer")
    moment = kill(victim)
    begun.wait_for_event(moment, "generation")
    assert begun.wait() == 0, begun.said()
    assert len(begun.ledger) == 6
    scored = [line["step"] for line in lines(begun.folder, "metrics.jsonl") if "eval_f1" in line]
    assert set(scored) >= {1, 2, 5, 6}


@pytest.mark.parametrize(("words", "line"), [
    (["eval.path=", "eval.every_steps=0"],
     "error: eval.generate: got true without eval.path; allowed: false, or held-out samples to answer"),
    (["eval.generate=perhaps"], "error: eval.generate: got 'perhaps' (the command line); allowed: true or false")])
def test_settings_that_are_refused(words: list[str], line: str, conversations: list[str], tmp_path: Path) -> None:
    assert refused(2, f"run.dir={tmp_path / 'run'}", *conversations, *words) == line
