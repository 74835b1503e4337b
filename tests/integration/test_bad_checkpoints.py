"""Run folders and checkpoints that a run cannot use, saves that fail, steps that must not be applied: what the user is
told, and how the run goes on.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.samples import picture, talk, write_rows
from tests.integration.jobs import Ended, ledger, lines, losses, refused, run, start, train

SETTINGS = ["data=llava", "cluster.device=cpu", "cluster.num_workers=2", "planner.tokens_per_rank=256",
            "batch.global_samples=2", "checkpoint.keep=9",
            # a machine that is busy with other things replaces no worker
            "train.min_learning_rate_ratio=1", "elastic.evict_below=0", "elastic.hang_s=120"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.png").write_bytes(picture(84, 56))
    rows = [{"id": f"row-{number}", "image": "a.png", "conversations": talk("<image>\nWhat is it?", f"Thing {number}.")}
            for number in range(12)]
    return [f"data.path={write_rows(folder / 'rows.json', rows)}", *SETTINGS]


@pytest.fixture(scope="module")
def whole_run(ray_cluster: None, data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, each with its checkpoint."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, *data, "run.steps=3", "checkpoint.every_steps=1")
    return folder


@pytest.fixture
def copied(whole_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


@pytest.mark.slow  # of one worker, in make test: test_evaluation.py
def test_a_half_written_checkpoint_is_ignored(copied: Path, data: list[str]) -> None:
    """As after a crash in the midst of a save; the steps after the one before it are run again, and are the same."""
    before = losses(copied)
    (copied / "checkpoints/step_000003/manifest.json").unlink()
    next((copied / "checkpoints/step_000003").glob("*/__1_0.distcp")).unlink()
    ended = train(copied, *data, "run.steps=4", "checkpoint.every_steps=0")
    assert "resuming after step 2" in ended.output
    assert losses(copied)[:3] == pytest.approx(before, rel=1e-5)
    assert [line["step"] for line in lines(copied, "ledger.jsonl")] == [1, 2, 3, 4]
    saved = sorted(path.name for path in (copied / "checkpoints").iterdir())
    assert saved == ["step_000001", "step_000002", "step_000004"]
    again = train(copied, *data, "run.steps=4", "checkpoint.every_steps=0")
    assert ("all 4 steps are done, and the model is written again; raise run.steps or run.epochs to train on"
            in again.output)


@pytest.mark.slow
def test_a_checkpoint_of_another_model(whole_run: Path, copied: Path, data: list[str], tmp_path: Path) -> None:
    """The folder that model.path names has come to hold another model since."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    model = Path(shutil.copytree(copied / "model", tmp_path / "model"))
    config = Qwen2_5_VLConfig.from_pretrained(model)
    config.text_config.intermediate_size = 256
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(model)
    stored = (copied / "config.yaml").read_text()
    changed = stored.replace("preset: tiny\n  path: ''", f"preset: ''\n  path: {model}")
    (copied / "config.yaml").write_text(changed)
    line = refused(1, f"run.dir={copied}", *data, f"model.path={model}", "run.steps=4")
    assert re.fullmatch(
        r"error: rank \d \(pid \d+ on node \w+\): checkpoints/step_000003/generation_\d+: of another model: trained "
        r"parameter \S+ has shape "
        r"\(256, 128\) in the model and \(352, 128\) in the checkpoint",
        line,
    ), line
    assert ledger(copied) == ledger(whole_run)


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "said"), [
    (lambda folder: next(folder.glob("*/__1_0.distcp")).write_bytes(b"cut short"),
     r"rank \d .*: checkpoints/step_000003/\w+: cannot be read: rank \d: "),
    (lambda folder: next(folder.glob("*/parameters.json")).unlink(),
     r"rank \d .*/checkpoints/step_000003/\w+/parameters\.json: cannot be read: "),
    (lambda folder: (folder / "manifest.json").write_text("{}"),
     r"/checkpoints/step_000003/manifest\.json: not the manifest of a checkpoint")])
def test_a_damaged_checkpoint(copied: Path, data: list[str], damage: Callable[[Path], Any], said: str) -> None:
    damage(copied / "checkpoints/step_000003")
    assert re.search(said, refused(1, f"run.dir={copied}", *data, "run.steps=4"))


@pytest.mark.slow
def test_a_run_folder_that_one_node_does_not_reach(ray_cluster: None, data: list[str], tmp_path: Path) -> None:
    """A second node of the cluster on this machine, which sees another disk in the folder's place."""
    (tmp_path / "shared").mkdir()
    node = f"exec {sys.executable} -m ray.scripts.scripts start --address=$RAY_ADDRESS --num-cpus=1 --block"
    hidden = f"mount -t tmpfs tmpfs {tmp_path}/shared && {node}"
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mount namespace can be made: {probe.stderr.strip()}")
    node = subprocess.Popen(["unshare", "--mount", "bash", "-c", hidden], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)
    try:
        import ray

        deadline = time.monotonic() + 120
        while len([found for found in ray.nodes() if found["Alive"]]) < 2:
            assert node.poll() is None, node.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        line = refused(1, f"run.dir={tmp_path / 'shared' / 'run'}", *data, "cluster.num_workers=3",
                       "cluster.cpus_per_worker=1")
        assert re.fullmatch(rf"error: rank \d \(.*\): .*{tmp_path}/shared/run.*", line), line
    finally:
        node.terminate()
        node.wait()


def limit_files(run_dir: Path, num_bytes: int) -> None:
    """Let the workers write no file larger than this: a limit of the system's, which can be lifted again."""
    for member in json.loads((run_dir / "cluster.json").read_text())["ranks"]:
        resource.prlimit(member["pid"], resource.RLIMIT_FSIZE,
                         (num_bytes, resource.prlimit(member["pid"], resource.RLIMIT_FSIZE)[1]))


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir, "events.jsonl") if line["kind"] == kind]


def failing_saves(
    run_dir: Path, settings: list[str], at_start: Callable[[], object], once_failed: Callable[[], object]
) -> Ended:
    """A run whose first saves fail, until what makes them fail is undone."""
    process = start("train.py", f"run.dir={run_dir}", *settings, "run.steps=60", "checkpoint.every_steps=4",
                    "checkpoint.keep=1")
    done = False
    deadline = time.monotonic() + 200
    for happened, then in ((lambda: (run_dir / "cluster.json").exists(), at_start),
                           (lambda: events(run_dir, "save_failed"), once_failed)):
        while not happened():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        then()
        done = then is once_failed
    assert done
    output, errors = process.communicate(timeout=200)
    return Ended(process.returncode, output, errors)


def assert_a_later_save_worked(run_dir: Path, ended: Ended, reason: str) -> None:
    assert ended.status == 0, ended.output + ended.errors
    assert "Traceback" not in ended.output + ended.errors
    assert re.search(
        rf"checkpoint not saved \(rank \d\): step 4: .*{reason}; the run goes on, the next save is tried\n",
        ended.output,
    ), ended.output
    failed = events(run_dir, "save_failed")
    assert reason in failed[0]["error"]
    assert len(losses(run_dir)) == 60
    saved = [event["step"] for event in events(run_dir, "checkpoint")]
    assert 4 not in saved
    assert saved[-1] == 60
    # nothing is left of those that failed
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000060"]


@pytest.mark.slow
def test_a_save_that_finds_no_room_is_told_and_the_next_one_is_tried(
    ray_cluster: None, data: list[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ended = failing_saves(run_dir, data, lambda: limit_files(run_dir, 2**20),
                          lambda: limit_files(run_dir, resource.RLIM_INFINITY))
    assert_a_later_save_worked(run_dir, ended, "File too large")


@pytest.mark.slow
def test_a_full_disk_while_saving(ray_cluster: None, data: list[str], small_disk: Path) -> None:
    """A disk of 24 MB, 12 of which are taken: a checkpoint has 10, the logs and plans little."""
    from tests.disks import fill

    run_dir, taken = small_disk / "run", small_disk / "taken"

    def leave_too_little() -> None:
        fill(taken)
        with open(taken, "r+b") as file:
            file.truncate(taken.stat().st_size - 7 * 2**20)

    ended = failing_saves(run_dir, data, leave_too_little, taken.unlink)
    assert_a_later_save_worked(run_dir, ended, "No space left on device")


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_skipped_on_all_ranks(
    ray_cluster: None, data: list[str], tmp_path: Path
) -> None:
    """A learning rate so high that the first update takes the weights out of all bounds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tmp_path / "run"
    ended = train(run_dir, *data, "run.steps=3", "train.learning_rate=1e30", "checkpoint.every_steps=1")
    assert ended.output.count("the gradient is not finite; update skipped on all ranks\n") == 2
    skipped = events(run_dir, "update_skipped")
    assert [event["step"] for event in skipped] == [2, 3]
    assert all(event["sample_ids"] for event in skipped)
    assert [bool(sample_ids) for sample_ids in ledger(run_dir)] == [True, False, False]
    assert [line["step"] for line in lines(run_dir, "metrics.jsonl")] == [1, 2, 3]
    assert losses(run_dir)[0] > 0
    assert losses(run_dir)[1:] == [None, None]
    saves = [next((run_dir / f"checkpoints/step_{step:06d}").glob("generation_*")) for step in (1, 2, 3)]
    versions = [json.loads((save / "parameters.json").read_text())["state_version"] for save in saves]
    assert versions == [1, 1, 1]
    parts = [[(save / f"__{rank}_0.distcp").read_bytes() for rank in (0, 1)] for save in saves]
    assert parts[0] == parts[1] == parts[2], "a rank has updated its shard"
    curves = EventAccumulator(str(run_dir / "tensorboard"))
    curves.Reload()
    assert [point.value for point in curves.Scalars("loss/update_applied")] == [1.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("options", ["no_such_option=1", "endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"])
def test_a_credential_of_the_run_folder_is_nowhere(ray_cluster: None, data: list[str], options: str) -> None:
    """A URI that storage refuses, and a server that does not answer (which takes a minute of attempts): the secret is
    in no line of it.
    """
    ended = run("train.py", f"run.dir=s3://KEY:s3cret@bucket/run?{options}", *data)
    assert ended.status == 1
    assert "s3cret" not in ended.output + ended.errors
    said = [line for line in ended.error_lines if line.startswith("error: ")]
    assert len(said) == 1
    assert "s3://***@bucket/run" in said[0]
