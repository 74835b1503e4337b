"""The loss on held-out samples: the same on any number of workers, equal to plain transformers', and told where the
losses are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.jobs import lines, losses, run, train

EVALUATED = ["eval.every_steps=2", "cluster.num_workers=1", "planner.tokens_per_rank=2048",
             "checkpoint.every_steps=3", "checkpoint.keep=2"]


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
def one_worker(
    ray_cluster: None, conversations: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    ended = train(folder, *conversations, *EVALUATED)
    return folder, ended.output


def test_it_is_written_after_every_so_many_steps(one_worker: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, output = one_worker
    first, second, third, fourth = eval_losses(folder)
    assert (first, third) == (None, None)
    assert second is not None
    assert fourth is not None
    assert 0 < fourth < second
    assert output.count("eval loss") == 2
    assert f"eval loss {fourth:.3f}" in output
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value)
            for point in events.Scalars("loss/eval")] == [(2, pytest.approx(second)), (4, pytest.approx(fourth))]


def test_it_is_the_same_after_a_half_written_checkpoint(
    one_worker: tuple[Path, str], conversations: list[str], tmp_path: Path
) -> None:
    """Which is ignored, as after a crash in the midst of a save: the last step is run again, and evaluated again."""
    folder = Path(shutil.copytree(one_worker[0], tmp_path / "run"))
    (folder / "checkpoints/step_000004/manifest.json").unlink()
    next((folder / "checkpoints/step_000004").glob("*/__0_0.distcp")).unlink()
    ended = train(folder, *conversations, *EVALUATED, "run.steps=4")
    assert "resuming after step 3" in ended.output
    assert losses(folder) == pytest.approx(losses(one_worker[0]), rel=1e-5)
    assert eval_losses(folder)[3] == pytest.approx(eval_losses(one_worker[0])[3], rel=1e-5)
    assert [line["step"] for line in lines(folder, "ledger.jsonl")] == [1, 2, 3, 4]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000003", "step_000004"]


@pytest.mark.slow
def test_it_is_the_same_on_three_workers(
    one_worker: tuple[Path, str], conversations: list[str], tmp_path: Path
) -> None:
    train(tmp_path / "three", *conversations, "eval.every_steps=2", "cluster.num_workers=3",
          "planner.tokens_per_rank=300", "planner.max_sequence_tokens=2048")
    assert losses(tmp_path / "three") == pytest.approx(losses(one_worker[0]), rel=1e-4)
    assert eval_losses(tmp_path / "three")[1::2] == pytest.approx(eval_losses(one_worker[0])[1::2], rel=1e-4)


@pytest.mark.slow
def test_it_changes_nothing(one_worker: tuple[Path, str], conversations: list[str], tmp_path: Path) -> None:
    train(tmp_path / "without", *[word for word in conversations if not word.startswith("eval.")],
          "cluster.num_workers=1", "planner.tokens_per_rank=2048")
    assert losses(tmp_path / "without") == losses(one_worker[0])


def test_it_is_plain_transformers_loss_of_the_held_out_samples(
    one_worker: tuple[Path, str], conversations: list[str], test_data: Path
) -> None:
    """The model that was saved at the end is the one that was evaluated after the last step."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.image_utils import load_image

    from dhp_ray.data.images import decode
    from dhp_ray.data.processor import ProcessorSpec

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(one_worker[0] / "model").eval()
    processor = ProcessorSpec(path=str(one_worker[0] / "model")).load()
    [path] = [word.partition("=")[2] for word in conversations if word.startswith("eval.path=")]
    held_out = json.loads(Path(path).read_text())
    loss_sum, count = 0.0, 0
    for row in held_out:
        names = [row["image"]] if isinstance(row["image"], str) else row["image"]
        encoded = processor.encode(row["conversations"],
                                   [load_image(str(test_data / "nlvr" / name)).size for name in names])
        ids, labels = (torch.tensor(values, dtype=torch.long)[None] for values in (encoded.input_ids, encoded.labels))
        with torch.no_grad():
            output = model(input_ids=ids, labels=labels, image_grid_thw=torch.tensor(encoded.grids),
                           mm_token_type_ids=(ids == model.config.image_token_id).int(),
                           pixel_values=torch.cat([torch.from_numpy(decode((test_data / "nlvr" / name).read_bytes(),
                                                                           processor.family)) for name in names]))
        valid = int((labels[:, 1:] != -100).sum())
        loss_sum, count = loss_sum + output.loss.item() * valid, count + valid
    assert eval_losses(one_worker[0])[-1] == pytest.approx(loss_sum / count, rel=1e-4)


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
