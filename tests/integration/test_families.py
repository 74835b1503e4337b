"""A model that someone else has written, trained through jobs/train.py, and what becomes of it: family by family."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dhp_ray.data.conversation import read_turns
from dhp_ray.data.images import decode, image_size
from dhp_ray.data.processor import Processor, ProcessorSpec
from dhp_ray.train.collate import Payload
from tests.integration.jobs import lines, losses, train
from tests.packs import PATCH_DIMS, plain_copy, plain_loss, rough_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
STEPS = 10
WAYS = ["planner.sync=step", "planner.sync=micro_batch", "train.activation_offload=0.5"]


def write(folder: Path, preset: str) -> PreTrainedModel:
    """A model by transformers' own `save_pretrained`, in bf16, with the files of its processor."""
    processor = ProcessorSpec(preset, "", 3136, 20000).load()
    module = plain_copy(rough_model(preset=preset)).bfloat16()
    module.save_pretrained(folder)
    processor.save(folder)
    return module


def keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", [*PATCH_DIMS, "tiny_qwen3_vl_moe", "tiny_qwen3_5_moe"])
def test_a_strangers_model_trains_alike_on_any_ranks_and_goes_back(
    preset: str, nlvr: list[str], test_data: Path, tmp_path: Path
) -> None:
    write(tmp_path / "given", preset)
    common = [*nlvr, "model.preset=", f"model.path={tmp_path / 'given'}", f"run.steps={STEPS}", "data.max_pixels=20000",
              "planner.tokens_per_rank=4096", "planner.max_sequence_tokens=768", "checkpoint.every_steps=0"]
    train(tmp_path / "alone", *common, "cluster.num_workers=1", "planner.name=static")
    for way in WAYS:
        folder = tmp_path / way.rpartition("=")[2]
        train(folder, *common, way, "cluster.num_workers=3", "planner.tokens_per_rank=256")
        assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    moved = [line["offload"] for line in lines(tmp_path / "0.5", "metrics.jsonl")]
    assert all(step["largest_share"] == 0.5 and step["packs"] > 0 and step["moved_bytes"] > 0 for step in moved)
    assert keys(tmp_path / "alone" / "model") == keys(tmp_path / "given")
    module, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "alone" / "model", dtype=torch.float32,
                                                                 output_loading_info=True)
    assert not any(report.values()), report
    check_evaluated(tmp_path, common, module, preset, test_data)


def check_evaluated(
    folder: Path, common: list[str], module: PreTrainedModel, preset: str, test_data: Path
) -> None:
    """The loss of the exported model by plain transformers is that of a first step from it; and it answers."""
    train(folder / "again", *common, f"model.path={folder / 'alone' / 'model'}", "run.steps=1", "cluster.num_workers=2",
          "batch.global_samples=4")
    taken = json.loads((folder / "again" / "ledger.jsonl").read_text().splitlines()[0])["sample_ids"]
    processor = ProcessorSpec("", str(folder / "alone" / "model"), 3136, 20000).load()
    assert losses(folder / "again")[0] == pytest.approx(mean_loss(module, processor, taken, test_data), rel=1e-4)
    picture = processor.family.image_processor(images=[Image.new("RGB", (56, 56), "red")], return_tensors="pt")
    turns = read_turns([{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "x"}])
    ids = torch.from_numpy(processor.encode_turns(turns, [(56, 56)]).input_ids.astype(np.int64))[None]
    if "image_grid_thw" in picture:
        picture["mm_token_type_ids"] = (ids == processor.token_ids["image"]).int()
    picture.pop("num_patches", None)
    answer = module.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **picture,  # type: ignore[operator]
                             max_new_tokens=5, do_sample=False)
    assert ids.shape[1] < answer.shape[1] <= ids.shape[1] + 5


def mean_loss(module: PreTrainedModel, processor: Processor, taken: list[str], test_data: Path) -> float:
    """The loss of samples of the real conversations, by plain transformers."""
    rows = {row["id"]: row for row in json.loads((test_data / "nlvr" / "conversations.json").read_text())}
    total = count = 0.0
    for name in taken:
        names = rows[name]["image"] if isinstance(rows[name]["image"], list) else [rows[name]["image"]]
        images = [(test_data / "nlvr" / image).read_bytes() for image in names]
        encoded = processor.encode(rows[name]["conversations"], [image_size(image) for image in images])
        payload = Payload(input_ids=encoded.input_ids, labels=encoded.labels, grids=np.array(encoded.grids),
                          pixels=[decode(image, processor.family) for image in images], media=np.array(encoded.media),
                          seconds=np.array(encoded.seconds))
        mean, valid = plain_loss(module, payload)
        total, count = total + mean.item() * valid, count + valid
    return float(total / count)
