"""Adapters (LoRA) trained on real images by jobs/train.py: on any ranks, resumed, loaded by PEFT, merged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.model.build import adapter_sizes, read_config
from dhp_ray.model.files import ADAPTER_FILE
from dhp_ray.model.lora import LoraSettings
from tests.integration.faults import Start, end, kill
from tests.integration.jobs import ledger, losses, refused, run, train
from tests.integration.test_families import mean_loss, write
from tests.packs import PATCH_DIMS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
STEPS = 20


@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", PATCH_DIMS)
def test_adapters_of_a_strangers_model(preset: str, nlvr: list[str], test_data: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    write(given, preset)
    common = [*nlvr, "model.preset=", f"model.path={given}", "data.max_pixels=20000", "train.min_learning_rate_ratio=1",
              "planner.max_sequence_tokens=768", "train.lora.rank=4", "train.lora.alpha=8", "train.learning_rate=3e-3"]
    train(tmp_path / "alone", *common, f"run.steps={STEPS}", "cluster.num_workers=1", "planner.tokens_per_rank=4096",
          "checkpoint.every_steps=0")
    folder = tmp_path / "run"
    train(folder, *common, f"run.steps={STEPS // 2}", "cluster.num_workers=3", "planner.tokens_per_rank=256",
          "planner.sync=step")
    train(folder, *common, f"run.steps={STEPS}", "cluster.num_workers=2", "planner.tokens_per_rank=384",
          "planner.sync=micro_batch")
    assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    assert losses(folder)[-1] < losses(folder)[0]
    described = next((folder / "checkpoints" / f"step_{STEPS:06d}").glob("*/parameters.json"))
    shapes = json.loads(described.read_text())["shapes"]
    sizes = adapter_sizes(read_config(str(given)), (), LoraSettings(4, 8.0, ("all-linear",)))
    assert sum(math.prod(shape) for shape in shapes.values()) == sum(sizes.values())
    assert all("lora_" in name for name in shapes)

    shutil.copytree(folder / "model", tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(given, dtype=torch.float32),
                                       tmp_path / "adapter")
    train(folder, *common, f"run.steps={STEPS + 1}", "cluster.num_workers=2", "planner.tokens_per_rank=384")
    processor = ProcessorSpec("", str(given), 3136, 20000).load()
    found = mean_loss(loaded.base_model.model, processor, ledger(folder)[-1], test_data)
    assert losses(folder)[-1] == pytest.approx(found, rel=1e-5)

    merged = run("merge.py", f"adapter={tmp_path / 'adapter'}", f"out={tmp_path / 'merged'}")
    assert merged.status == 0, merged.errors
    before, after = (load_file(place / "model.safetensors") for place in (given, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = sum(not torch.equal(before[key], after[key]) for key in before)
    assert changed == len(load_file(tmp_path / "adapter" / ADAPTER_FILE)) // 2

    line = refused(2, f"run.dir={folder}", *common, "train.lora.rank=8", f"run.steps={STEPS + 2}")
    assert "train.lora.rank: got 8; the run in" in line


def test_targets_that_match_nothing_end_in_one_line(nlvr: list[str], tmp_path: Path) -> None:
    write(tmp_path / "given", "tiny")
    line = refused(1, f"run.dir={tmp_path / 'run'}", *nlvr, "model.preset=", f"model.path={tmp_path / 'given'}",
                   "run.steps=1", "cluster.num_workers=1", "train.lora.rank=4", "train.lora.targets=[c_attn]")
    assert "train.lora.targets: 'c_attn' names no linear layer that may be trained" in line


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["planner.sync=step", "planner.sync=micro_batch"])
def test_a_worker_is_killed(way: str, start: Start, common: list[str], tmp_path: Path) -> None:
    write(tmp_path / "given", "tiny")
    settings = ["model.preset=", f"model.path={tmp_path / 'given'}", "train.lora.rank=4", "train.lora.dropout=0.1",
                "train.freeze=[vision]", way]
    train(tmp_path / "calm", *common, *settings, "run.steps=10", "cluster.num_workers=2", "checkpoint.every_steps=0")
    run = start(*settings)
    run.wait_for_step(2)
    moment = kill(run.pids[0])
    run.wait_for_event(moment, "generation")
    run.wait_for_step(10)
    end(run)
    assert run.losses[:10] == pytest.approx(losses(tmp_path / "calm"), rel=1e-4)
