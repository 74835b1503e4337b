"""Whole runs on real conversations: the same loss on every number of workers, going on after a kill."""

from __future__ import annotations

import math
import re
import signal
import time
from pathlib import Path

import pytest

from tests.integration.jobs import ledger, lines, losses, start, train

STEPS = 20


@pytest.fixture(scope="session")
def one_worker(ray_cluster: None, nlvr: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    train(folder, *nlvr, f"run.steps={STEPS}", "cluster.num_workers=1", "planner.tokens_per_rank=4096",
          "checkpoint.every_steps=0")
    return folder


def longest(run_dir: Path) -> int:
    """Tokens of the longest sequence that the run met, from its plan files."""
    import json

    tokens = [sample["text_tokens"] + sample["vision_tokens"] for plan in sorted((run_dir / "plans").iterdir())
              for sample in json.loads(plan.read_text())["inputs"]["samples"]]
    return max(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [3, 5])
@pytest.mark.parametrize("transport", ["pool", "parent"])
def test_any_number_of_workers_gives_the_loss_of_one(
    one_worker: Path, nlvr: list[str], tmp_path: Path, num_workers: int, transport: str
) -> None:
    tokens_per_rank = math.ceil(longest(one_worker) / num_workers)
    train(tmp_path / "run", *nlvr, f"run.steps={STEPS}", f"cluster.num_workers={num_workers}",
          f"comm.transport={transport}",
          f"planner.tokens_per_rank={tokens_per_rank}", "checkpoint.every_steps=0")
    assert ledger(tmp_path / "run") == ledger(one_worker)
    assert losses(tmp_path / "run") == pytest.approx(losses(one_worker), rel=1e-4)
    degrees = {int(degree) for line in lines(tmp_path / "run", "metrics.jsonl") for degree in line["degrees"]}
    assert num_workers in degrees, degrees
    assert len(degrees) >= 2, degrees


@pytest.mark.slow
def test_micro_batch_gives_the_losses_of_step_and_goes_on_with_step(
    ray_cluster: None, nlvr: list[str], tmp_path: Path
) -> None:
    common = [*nlvr, "cluster.num_workers=3", "planner.tokens_per_rank=320", "planner.max_sequence_tokens=768",
              "train.min_learning_rate_ratio=1", "checkpoint.every_steps=0"]
    train(tmp_path / "step", *common, "run.steps=8")
    train(tmp_path / "micro_batch", *common, "run.steps=6", "planner.sync=micro_batch")
    assert {"1", "2", "3"} <= {degree for line in lines(tmp_path / "micro_batch", "metrics.jsonl")
                               for degree in line["degrees"]}
    ended = train(tmp_path / "micro_batch", *common, "run.steps=8", "planner.sync=step")
    assert "resuming after step 6" in ended.output
    assert ledger(tmp_path / "micro_batch") == ledger(tmp_path / "step")
    assert losses(tmp_path / "micro_batch") == pytest.approx(losses(tmp_path / "step"), rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_wherever_its_parameters_lie(ray_cluster: None, nlvr: list[str], tmp_path: Path) -> None:
    common = [*nlvr, "cluster.num_workers=3", "planner.tokens_per_rank=256", "planner.max_sequence_tokens=768",
              "train.min_learning_rate_ratio=1", "checkpoint.every_steps=0"]
    train(tmp_path / "whole", *common, "run.steps=9")
    ways = ("micro_batch", "step", "micro_batch", "step")
    for begun, steps, sync in zip((0, 2, 4, 6), (2, 4, 6, 9), ways, strict=True):
        ended = train(tmp_path / "changing", *common, f"run.steps={steps}", f"planner.sync={sync}")
        assert (f"resuming after step {begun}" in ended.output) is (begun > 0)
    assert ledger(tmp_path / "changing") == ledger(tmp_path / "whole")
    assert losses(tmp_path / "changing") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(one_worker: Path, nlvr: list[str], tmp_path: Path) -> None:
    """On two workers, with the samples and losses of the run on one that nothing happened to."""
    common = [*nlvr, f"run.steps={STEPS}", "cluster.num_workers=2", "planner.tokens_per_rank=4096",
              "checkpoint.every_steps=3"]
    process = start("train.py", f"run.dir={tmp_path / 'killed'}", *common)
    deadline = time.monotonic() + 120
    while len(lines(tmp_path / "killed",
                    "ledger.jsonl")) < 5 or not (tmp_path / "killed/checkpoints/step_000003/manifest.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    committed = len(lines(tmp_path / "killed", "ledger.jsonl"))
    assert 5 <= committed < STEPS
    ended = train(tmp_path / "killed", *common)
    resumed = re.search(r"resuming after step (\d+)", ended.output)
    assert resumed is not None
    assert 3 <= int(resumed[1]) <= committed
    assert int(resumed[1]) % 3 == 0
    assert ledger(tmp_path / "killed") == ledger(one_worker)
    assert losses(tmp_path / "killed") == pytest.approx(losses(one_worker), rel=1e-4)
    assert [line["generation"] for line in lines(tmp_path / "killed", "metrics.jsonl")][::STEPS - 1] == [1, 2]


@pytest.mark.slow
def test_one_rank_only_waits_between_packs(one_worker: Path) -> None:
    assert all(0.0 <= line["idle_fraction"] < 0.5 for line in lines(one_worker, "metrics.jsonl"))


@pytest.mark.slow
def test_plain_transformers_gives_the_training_codes_loss(
    one_worker: Path, nlvr: list[str], tmp_path: Path, test_data: Path
) -> None:
    """One more step at a learning rate of (almost) nothing, on one sample, is the training code's loss of the saved
    model.
    """
    import json

    import torch
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.image_utils import load_image

    folder = test_data / "nlvr"
    conversation = next(row for row in json.loads((folder / "conversations.json").read_text())
                        if isinstance(row["image"], list) and len(row["image"]) == 2)
    (tmp_path / "one.json").write_text(json.dumps([conversation]))
    train(tmp_path / "run", *nlvr, f"data.path={tmp_path / 'one.json'}", f"model.path={one_worker / 'model'}",
          "run.steps=1", "cluster.num_workers=2",
          "batch.global_samples=1", "planner.tokens_per_rank=512")

    from dhp_ray.data.images import decode
    from dhp_ray.data.processor import ProcessorSpec

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(one_worker / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(one_worker / "model")
    processor = ProcessorSpec(path=str(one_worker / "model")).load()
    images = [(folder / name).read_bytes() for name in conversation["image"]]
    sizes = [load_image(str(folder / name)).size for name in conversation["image"]]
    encoded = processor.encode(conversation["conversations"], sizes)
    input_ids = torch.tensor(encoded.input_ids, dtype=torch.long)[None]
    assert input_ids.max() < len(tokenizer)
    with torch.no_grad():
        output = model(input_ids=input_ids, labels=torch.tensor(encoded.labels, dtype=torch.long)[None],
                       pixel_values=torch.cat([torch.from_numpy(decode(image, processor.family)) for image in images]),
                       image_grid_thw=torch.tensor(encoded.grids),
                       mm_token_type_ids=(input_ids == model.config.image_token_id).int())
    assert losses(tmp_path / "run")[0] == pytest.approx(output.loss.item(), rel=1e-4)
