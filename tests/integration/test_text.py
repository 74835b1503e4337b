"""A language model alone through jobs/train.py: rows of text, on any ranks, and what becomes of it.

In make test its parts: train/test_random_plans.py, data/families/test_text_families.py, runtime/worker/test_export.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.train.collate import Payload
from tests.data.samples import picture, talk
from tests.integration.jobs import ledger, lines, losses, train
from tests.packs import EXPERT_PRESETS, TEXT_PRESETS, plain_copy, plain_loss, rough_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
STEPS = 10
WORDS = ("the", "cat", "sat", "on", "mat", "and", "looked", "at", "a", "bird", "in", "tall", "tree")


def write_texts(path: Path, count: int = 40) -> dict[str, list[dict[str, str]]]:
    """Conversations of 30 to 700 bytes, and one with an image, whose id is `shown`."""
    random, rows = np.random.default_rng(0), {}
    for number in range(count):
        length = int(10 ** random.uniform(0.5, 2.1))
        rows[f"text-{number}"] = talk(f"Say {number}", " ".join(random.choice(WORDS, length)))
    (path.parent / "a.png").write_bytes(picture(40, 40))
    shown = {"id": "shown", "image": "a.png", "conversations": talk("<image>What?", "A cat.")}
    path.write_text(json.dumps([shown, *({"id": name, "conversations": talk_} for name, talk_ in rows.items())]))
    return rows


def mean_loss(folder: Path, rows: dict[str, list[dict[str, str]]], taken: list[str]) -> float:
    """Of samples, by plain transformers."""
    module, processor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ProcessorSpec(
        "", str(folder)).load()
    total = count = 0.0
    for name in taken:
        encoded = processor.encode(rows[name], [])
        mean, valid = plain_loss(module, Payload(input_ids=encoded.input_ids, labels=encoded.labels,
                                                 grids=np.zeros((0, 3)), pixels=[]))
        total, count = total + mean.item() * valid, count + valid
    return total / count


@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", TEXT_PRESETS)
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_text_trains_alike_on_any_ranks_and_goes_back(preset: str, sync: str, tmp_path: Path) -> None:
    rows = write_texts(tmp_path / "rows.json")
    plain_copy(rough_model(preset=preset)).save_pretrained(tmp_path / "given")
    ProcessorSpec(preset).load().save(tmp_path / "given")
    common = ["model.preset=", f"model.path={tmp_path / 'given'}", "data.format=llava",
              f"data.path={tmp_path / 'rows.json'}", f"run.steps={STEPS}", "batch.global_samples=8",
              "planner.max_sequence_tokens=768", "cluster.device=cpu", "cluster.cpus_per_worker=0.1",
              "checkpoint.every_steps=0"]
    train(tmp_path / "many", *common, f"planner.sync={sync}", "cluster.num_workers=3", "planner.tokens_per_rank=256")
    metrics = lines(tmp_path / "many", "metrics.jsonl")
    assert max(int(degree) for step in metrics for degree in step["degrees"]) == 3
    if preset in EXPERT_PRESETS:
        assert all(0.5 < step["experts"]["entropy"] <= 1 <= step["experts"]["max_load"] <= 3 for step in metrics)
    first = mean_loss(tmp_path / "given", rows, ledger(tmp_path / "many")[0])
    assert losses(tmp_path / "many")[0] == pytest.approx(first, rel=1e-5)
    assert {(line["id"], line["reason"]) for line in lines(tmp_path / "many", "skipped.jsonl")} == {
        ("shown", "an image; allowed: text, which is all that the model takes")}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "many" / "model")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    after = mean_loss(tmp_path / "many" / "model", rows, ledger(tmp_path / "many")[0])
    assert after < 0.99 * first
    alone = ["cluster.num_workers=1", "planner.tokens_per_rank=2048"]
    train(tmp_path / "alone", *common, "planner.name=static", *alone)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    train(tmp_path / "again", *common, f"model.path={tmp_path / 'many' / 'model'}", "run.steps=1", *alone)
    wanted = mean_loss(tmp_path / "many" / "model", rows, ledger(tmp_path / "again")[0])
    assert losses(tmp_path / "again")[0] == pytest.approx(wanted, rel=1e-5)
