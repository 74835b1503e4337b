"""The loss on held-out samples: the same on any number of workers, equal to plain transformers', and told where the
losses are. In make test that of the default run's first steps (conftest.py).
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from tests.integration.jobs import FIRST_STEPS, FirstRun, lines, losses, run, train


@pytest.fixture(scope="module")
def conversations(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Training and held-out conversations, apart."""
    folder = tmp_path_factory.mktemp("split")
    rows = [row for row in json.loads((test_data / "nlvr" / "conversations.json").read_text())
            if isinstance(row["image"], str) or len(row["image"]) < 4]
    (folder / "train.json").write_text(json.dumps(rows[:24]))
    (folder / "held_out.json").write_text(json.dumps(rows[30:41]))
    return ["data=llava", f"data.path={folder / 'train.json'}", f"data.image_root={test_data / 'nlvr'}",
            f"eval.path={folder / 'held_out.json'}",
            "batch.global_samples=4", "run.steps=4", "train.adam_eps=1e-6", "checkpoint.every_steps=0"]


def eval_losses(run_dir: Path) -> list[float | None]:
    return [line.get("eval_loss") for line in lines(run_dir, "metrics.jsonl")]


@pytest.fixture(scope="module")
def one_worker(ray_cluster: None, conversations: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    train(folder, *conversations, "eval.every_steps=3", "cluster.num_workers=1", "planner.tokens_per_rank=2048")
    return folder


def test_it_is_written_after_every_so_many_steps(first_run: FirstRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = eval_losses(first_run.folder)
    assert [step for step, loss in enumerate(found, 1) if loss is not None] == [3, 6, 9]
    first, second, third = (loss for loss in found if loss is not None)
    assert 0 < third < second < first
    output = first_run.ended.output
    assert output.count("eval loss") == 3
    assert f"eval loss {third:.3f}" in output
    events = EventAccumulator(str(first_run.folder / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss/eval")] == [
        (3, pytest.approx(first)), (6, pytest.approx(second)), (9, pytest.approx(third))]


def test_it_is_the_same_after_a_half_written_checkpoint(first_run: FirstRun, tmp_path: Path) -> None:
    """Which is ignored, as after a crash in the midst of a save: the last step is run again, and evaluated again, by
    one worker in place of two.
    """
    folder = Path(shutil.copytree(first_run.folder, tmp_path / "run"))
    (folder / "checkpoints/step_000009/manifest.json").unlink()
    next((folder / "checkpoints/step_000009").glob("*/__1_0.distcp")).unlink()
    ended = train(folder, *first_run.arguments, "cluster.num_workers=1", "planner.tokens_per_rank=1920")
    assert "resuming after step 8" in ended.output
    assert losses(folder) == pytest.approx(losses(first_run.folder), rel=1e-4)
    assert eval_losses(folder)[8] == pytest.approx(eval_losses(first_run.folder)[8], rel=1e-4)
    assert [line["step"] for line in lines(folder, "ledger.jsonl")] == list(range(1, FIRST_STEPS + 1))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000008", "step_000009"]


@pytest.mark.slow
def test_it_is_the_same_on_three_workers(
    one_worker: Path, conversations: list[str], tmp_path: Path
) -> None:
    train(tmp_path / "three", *conversations, "eval.every_steps=3", "cluster.num_workers=3",
          "planner.tokens_per_rank=300", "planner.max_sequence_tokens=2048")
    assert losses(tmp_path / "three") == pytest.approx(losses(one_worker), rel=1e-4)
    assert eval_losses(one_worker)[:2] == eval_losses(tmp_path / "three")[:2] == [None, None]
    assert eval_losses(tmp_path / "three")[2:] == pytest.approx(eval_losses(one_worker)[2:], rel=1e-4)


@pytest.mark.slow
def test_it_changes_nothing(one_worker: Path, conversations: list[str], tmp_path: Path) -> None:
    train(tmp_path / "without", *[word for word in conversations if not word.startswith("eval.")],
          "cluster.num_workers=1", "planner.tokens_per_rank=2048")
    assert losses(tmp_path / "without") == losses(one_worker)


def test_it_is_plain_transformers_loss_of_the_held_out_samples(first_run: FirstRun) -> None:
    """The model that was saved at the end is the one that was evaluated after the last step."""
    import pyarrow.parquet as pq
    import torch
    from PIL import Image
    from transformers import Qwen2_5_VLForConditionalGeneration

    from dhp_ray.data.images import decode
    from dhp_ray.data.processor import ProcessorSpec

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(first_run.folder / "model").eval()
    processor = ProcessorSpec(path=str(first_run.folder / "model")).load()
    loss_sum, count = 0.0, 0
    for row in pq.read_table(first_run.held_out).to_pylist():
        encoded = processor.encode(row["conversations"], [Image.open(io.BytesIO(file)).size for file in row["images"]])
        ids, labels = (torch.tensor(values, dtype=torch.long)[None] for values in (encoded.input_ids, encoded.labels))
        with torch.no_grad():
            output = model(input_ids=ids, labels=labels, image_grid_thw=torch.tensor(encoded.grids),
                           mm_token_type_ids=(ids == model.config.image_token_id).int(),
                           pixel_values=torch.cat([torch.from_numpy(decode(file, processor.family))
                                                   for file in row["images"]]))
        valid = int((labels[:, 1:] != -100).sum())
        loss_sum, count = loss_sum + output.loss.item() * valid, count + valid
    assert eval_losses(first_run.folder)[-1] == pytest.approx(loss_sum / count, rel=1e-4)


def with_a_bad_one(conversations: list[str], tmp_path: Path) -> tuple[str, list[str]]:
    """The id of the bad held-out sample, and the settings of the run."""
    path = next(word for word in conversations if word.startswith("eval.path=")).partition("=")[2]
    rows = json.loads(Path(path).read_text())[:3]
    rows[1]["image"] = "images/absent.png"
    (tmp_path / "held_out.json").write_text(json.dumps(rows))
    settings = [*conversations, f"eval.path={tmp_path / 'held_out.json'}", "eval.every_steps=1", "run.steps=2",
                "cluster.num_workers=1",
                "planner.tokens_per_rank=2048"]
    return rows[1]["id"], settings


@pytest.mark.slow
def test_a_bad_held_out_sample_is_left_out(ray_cluster: None, conversations: list[str], tmp_path: Path) -> None:
    bad, settings = with_a_bad_one(conversations, tmp_path)
    ended = train(tmp_path / "run", *settings)
    assert ended.output.count(f"held-out sample {bad} left out") == 1
    assert None not in eval_losses(tmp_path / "run")


@pytest.mark.slow
def test_a_bad_held_out_sample_ends_the_run_when_asked(
    ray_cluster: None, conversations: list[str], tmp_path: Path
) -> None:
    bad, settings = with_a_bad_one(conversations, tmp_path)
    failed = run("train.py", f"run.dir={tmp_path / 'strict'}", *settings, "data.on_error=fail")
    assert failed.status == 1
    [line] = [line for line in failed.error_lines if line.startswith(f"error: eval.path: sample {bad}: ")]
    assert line.endswith("; the newest checkpoint is step 1: start the same command again to go on from it")
    assert [line["step"] for line in lines(tmp_path / "strict", "ledger.jsonl")] == [1], "the step before is committed"
