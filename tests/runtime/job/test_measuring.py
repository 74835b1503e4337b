"""jobs/measure.py: what it refuses, and a whole measurement on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dhp_ray.model.build import build_model
from dhp_ray.planner import ClusterSpec, Sample, plan_batch
from dhp_ray.planner.cost.origin import CostFile
from dhp_ray.runtime import strategy
from dhp_ray.runtime.job import measuring
from tests.checkout import job_of
from tests.packs import TOKEN_IDS, save_model

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def job() -> Any:
    return job_of("measure")


@pytest.mark.parametrize(("words", "message"), [
    (["ranks=0"], "ranks: got '0'; allowed: a whole number of at least 1"),
    (["ranks=4096"], "ranks: got 4096; this machine has "),
    (["ranks=²"], "ranks: got '²'; allowed: a whole number of at least 1"),
    (["max_tokens=10"], "max_tokens: got '10'; allowed: a whole number of at least 64"),
    (["max_tokens=99999999999"], "max_tokens: got 99999999999; allowed: at most "),
    (["out=cost.txt"], "out: got 'cost.txt'; allowed: a file name that ends in .yaml"),
    (["name=a/b"], "name: got 'a/b'; allowed: a name without a slash"),
    (["model=enormous"], "model: got 'enormous'; allowed: "),
    (["model.preset=enormous"], "model.preset: got 'enormous'; allowed: "),
    (["model.path=/nowhere"], "model.path: "),
    (["cluster.device=tpu"], "cluster.device: got 'tpu'; allowed: auto, cpu, cuda, npu"),
    (["train.activation_checkpointing=auto"], "train.activation_checkpointing: got auto; allowed here: "),
    (["ranks=64", "model.preset=enormous"], "model.preset: got 'enormous'; allowed: "),
    (["out=s3://bucket/cost.yaml"], "out: got s3://bucket/cost.yaml; allowed: a path of this machine"),
    (["quik=true"], "quik: no such key (the command line); allowed: name, out, ranks, max_tokens, "
                    "cluster, data, model, planner, train")])
def test_bad_words_are_refused_in_one_line(
    job: Any, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert job.main(["cluster.device=cpu", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"error: {message}")


def test_a_folder_without_processor_is_refused_in_one_line(
    job: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    adapter = build_model("tiny", "", TOKEN_IDS, 0)
    save_model(adapter, tmp_path, {name: parameter.detach() for name, parameter in adapter.module.named_parameters()})
    assert job.main(["cluster.device=cpu", f"model.path={tmp_path}", "train.activation_checkpointing=true"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"error: model.path: {tmp_path} has no tokenizer; ")


def test_an_interrupt_is_one_line(
    job: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "measure", interrupted)
    assert job.main(["cluster.device=cpu"]) == 1
    assert capsys.readouterr().err == "error: stopped: Ctrl-C; measure again\n"


def test_a_device_that_is_not_here_is_refused(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert job.main(["cluster.device=cuda", "train.precision=bf16"]) == 2
    assert capsys.readouterr().err.startswith("error: cluster.device: got 'cuda', but this machine has no cuda device")


def test_without_a_file_the_devices_of_this_machine_are_measured(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(job, "measure", lambda config, *_: given.append(config) or 0)
    assert (job.main(["model=small"]), job.main(["cluster=local"])) == (0, 0)
    assert [(config.model.preset, config.cluster.device) for config in given] == [("small", "auto"), ("tiny", "cpu")]


def test_the_file_of_a_run_needs_no_data(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(job, "measure", lambda config, *_: given.append(config) or 0)
    words = ["--config", str(ROOT / "conf" / "finetune.yaml"), "model.path=m"]
    assert (job.main(words), job.main([*words, "data=llava", "data.max_pixels=5000"])) == (0, 0)
    assert [(config.model.path, config.data.max_pixels) for config in given] == [("m", 1003520), ("m", 5000)]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    job: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(measuring, "measure_here", never)
    (tmp_path / "file").write_text("")
    assert job.main(["cluster.device=cpu", "model.preset=tiny", f"out={tmp_path / 'file' / 'cost.yaml'}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: out: {tmp_path / 'file' / 'cost.yaml'} cannot be written: ")
    (tmp_path / "cost.png").mkdir()  # the picture's place
    assert job.main(["cluster.device=cpu", "model.preset=tiny", f"out={tmp_path / 'cost.yaml'}"]) == 1
    assert capsys.readouterr().err == f"error: out: {tmp_path / 'cost.yaml'} cannot be written: Is a directory\n"


def test_a_damaged_file_of_known_costs_is_refused_before_anything_is_measured(
    job: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cost").mkdir()
    (tmp_path / "cost" / "cpu.yaml").write_text("linear_s: -1\n")
    monkeypatch.setattr(strategy, "CONF", tmp_path)
    assert job.main(["cluster.device=cpu", "model.preset=tiny"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"error: {tmp_path / 'cost' / 'cpu.yaml'}: ")


@pytest.mark.slow
def test_a_measurement_gives_a_file_that_plans(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "jobs" / "measure.py"), "model=tiny", "cluster.device=cpu",
         "max_tokens=1024", "planner.sync=auto", f"out={tmp_path / 'cost.yaml'}"], cwd=ROOT, capture_output=True,
        text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    parts = [line.partition(" (")[0] for line in done.stdout.splitlines() if line.startswith("measuring ")]
    assert len(parts) == len(set(parts)) > 2  # a line for a part in a mode
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    file = CostFile.load(tmp_path / "cost.yaml")
    assert file.origin is not None
    assert (file.origin.model["name"], file.origin.device["kind"]) == ("tiny", "cpu")
    assert file.origin.settings["sync"] == ["step", "micro_batch"]
    assert 1e-5 < file.cost.linear_s < 1e-3
    assert 0 < file.cost.fixed_s_by_sync["step"] < 0.5
    assert "\nMeasured by jobs/measure.py on " in done.stdout
    assert done.stdout.endswith(f"written: {tmp_path / 'cost.yaml'}, {tmp_path / 'cost.png'}\n")
    tree = yaml.safe_load((tmp_path / "cost.yaml").read_text())
    assert tree["measured"]["packs"] > 20
    assert tree["errors"]["packs"]["median"] < 0.25  # also on cores that others use
    plan_batch([Sample("a", 900), Sample("b", 80)], ClusterSpec(2, 2, 1024), file.cost).validate()
