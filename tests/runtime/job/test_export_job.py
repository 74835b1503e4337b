"""jobs/export.py as a user runs it."""

from __future__ import annotations

import json
import re
import resource
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dhp_ray.comm.device import CPU
from dhp_ray.config import dump, load
from dhp_ray.data.processor import ProcessorSpec
from dhp_ray.model.files import ADAPTER_FILE, ADAPTER_SETTINGS, BASE_KEY, fingerprint
from dhp_ray.runtime.messages import Membership
from dhp_ray.runtime.records.checkpoints import Checkpoints, Manifest
from dhp_ray.runtime.worker.rank import Rank
from dhp_ray.storage import Folder
from tests.ranks import run_processes
from tests.runtime.worker.test_export import exported, given, same_bits

ROOT = Path(__file__).resolve().parents[3]


def saved(rank: int, port: int, settings: list[str]) -> None:
    """Save a state that is not the one that a run begins with as step 20, then export it."""
    config = load(["cluster.device=cpu", *settings])
    member = Rank(config, Membership(rank, 2, 3, "127.0.0.1", port), CPU)
    state = member.engine.current
    state.value += torch.linspace(0, 1, len(state.value))
    state.version = 20
    member.engine.all_gather_parameters()
    member.checkpointer.begin(20)
    member.checkpointer.finish()
    assert member.checkpointer.poll() == ([20], "")
    processor = ProcessorSpec(config.model.preset, config.model.path).load()
    member.export("model", processor.save)
    member.close()


def resumed(rank: int, port: int, settings: list[str]) -> None:
    member = Rank(load(["cluster.device=cpu", *settings]), Membership(rank, 2, 4, "127.0.0.1", port), CPU)
    try:
        member.checkpointer.load("checkpoints/step_000020/generation_3")
    finally:
        member.close()


def run_with(folder: str, *settings: str) -> None:
    """A run folder with a checkpoint of step 20 and the model of that step."""
    run_processes(saved, 2, [*settings, f"run.dir={folder}"])
    run = Folder(folder)
    run.write("config.yaml", dump(load([f"run.dir={folder}", *settings])).encode())
    Checkpoints(run, 2).seal(Manifest(20, {}, 2, "step", 3))


def export(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "jobs" / "export.py"), *arguments], cwd=ROOT, capture_output=True,
                          text=True, timeout=240, check=False)


def same_models(first: Path, second: Path) -> bool:
    names = {file.name for file in first.iterdir()}
    assert names == {file.name for file in second.iterdir()}
    one, other = exported(first), exported(second)
    assert one.keys() == other.keys()
    described = all((first / name).read_bytes() == (second / name).read_bytes() for name in names
                    if not name.endswith(".safetensors"))
    return described and all(same_bits(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["preset", "folder"])
def test_a_checkpoint_becomes_what_the_run_would_write(kind: str, tmp_path: Path) -> None:
    model = ["model.preset=", f"model.path={given(tmp_path / 'given')}"] if kind == "folder" else ["model.preset=tiny"]
    run_with(str(tmp_path / "run"), *model, "train.freeze=[vision]")
    done = export(f"run.dir={tmp_path / 'run'}", "checkpoint=20")
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "run/exports/step_000020"
    assert done.stdout.startswith(f"{out}: the model of step 20, ")
    assert same_models(out, tmp_path / "run/model")
    assert [path.name for path in out.parent.iterdir()] == ["step_000020"]
    done = export(f"run.dir={tmp_path / 'run'}", f"out={tmp_path / 'elsewhere'}")
    assert (done.returncode, done.stderr) == (0, "")
    assert same_models(tmp_path / "elsewhere", out)


@pytest.mark.slow
def test_adapters_of_a_checkpoint_and_weights_that_are_not_those_of_the_run(tmp_path: Path) -> None:
    source, run = given(tmp_path / "given"), tmp_path / "run"
    run_with(str(run), "model.preset=", f"model.path={source}", "train.lora.rank=4")
    assert export(f"run.dir={run}").returncode == 0
    mine, theirs = (folder / ADAPTER_FILE for folder in (run / "exports/step_000020", run / "model"))
    one, other = load_file(mine), load_file(theirs)
    assert one.keys() == other.keys()
    assert all(same_bits(one[name], other[name]) for name in one)
    assert (mine.parent / ADAPTER_SETTINGS).read_bytes() == (theirs.parent / ADAPTER_SETTINGS).read_bytes()
    for file in (mine, theirs):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt", BASE_KEY: fingerprint(str(source))}

    shutil.copytree(source, tmp_path / "other")
    for file in (tmp_path / "other").glob("*.safetensors"):
        save_file({name: value * 2 if value.itemsize > 1 else value for name, value in load_file(file).items()}, file,
                  {"format": "pt"})
    done = export(f"run.dir={run}", f"model.path={tmp_path / 'other'}", f"out={tmp_path / 'out'}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {run}/checkpoints/step_000020/generation_3: trained beside other weights than those in model.path, "
        f"{tmp_path / 'other'}; allowed: the folder that the run began with\n")
    with pytest.raises(AssertionError, match=r"trained beside other weights than those in model\.path"):
        run_processes(resumed, 2, ["model.preset=", f"model.path={tmp_path / 'other'}", "train.lora.rank=4",
                                   f"run.dir={run}"])


@pytest.mark.slow
def test_a_checkpoint_on_an_object_store(object_store: str, tmp_path: Path) -> None:
    uri = f"s3://bucket/{tmp_path.name}{object_store}"
    run_with(uri, "model.preset=tiny")
    refused = export(f"run.dir={uri}")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: out: not given; ")
    done = export(f"run.dir={uri}", f"out={tmp_path / 'out'}")
    assert (done.returncode, done.stderr) == (0, "")
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")
    main = runpy.run_path(str(ROOT / "jobs" / "export.py"))["main"]
    source, run, empty = given(tmp_path / "given"), tmp_path / "run", tmp_path / "empty"
    run_with(str(run), "model.preset=", f"model.path={source}")
    empty.mkdir()
    (empty / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    moved = source.rename(tmp_path / "moved")
    other = tmp_path / "other"
    shutil.copytree(run, other)
    shapes = next(other.rglob("parameters.json"))
    shapes.write_text(json.dumps({"shapes": {}}))
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    for file in cut.rglob("*.distcp"):
        file.write_bytes(b"")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.yaml").write_text("run: [")
    at = f"run.dir={run}"
    cases = [(2, f"run.dir: no run in {tmp_path / 'absent'} ", f"run.dir={tmp_path / 'absent'}"),
             (2, "run.dir: not given", "checkpoint=1"),
             (2, f"run.dir: {damaged}/config.yaml is not YAML: ", f"run.dir={damaged}"),
             (2, "run.dri=x: not understood", "run.dri=x"),
             (2, "checkpoint: got 'last'; allowed: latest", at, "checkpoint=last"),
             (2, "ruh.dir=x: not understood; allowed: --help, run.dir=..., checkpoint=...", "ruh.dir=x"),
             (2, "checkpoint: got 7; allowed, of those kept: 20", at, "checkpoint=7"),
             (2, f"checkpoint: {empty} holds no whole checkpoint", f"run.dir={empty}"),
             (2, f"out: {moved} exists and is not an empty folder", at, f"out={moved}"),
             (2, f"model.path: no folder {source}", at),
             (1, "of another model: trained parameter", f"run.dir={other}", f"model.path={moved}"),
             (1, f"{cut}/checkpoints/step_000020/generation_3: cannot be read: ", f"run.dir={cut}",
              f"model.path={moved}")]
    for status, words, *arguments in cases:
        assert main(list(arguments)) == status
        said = capsys.readouterr()
        assert said.out == ""
        assert words in said.err
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1
    assert not list(tmp_path.rglob("exports/*"))
    (run / "exports/.step_000020.unfinished/left").mkdir(parents=True)  # by an export that was killed
    assert main([at, f"model.path={moved}"]) == 0
    assert re.search(r"step_000020: the model of step 20, [1-9][\d,]*\.\d MB$", capsys.readouterr().out.strip())
    assert [path.name for path in (run / "exports").iterdir()] == ["step_000020"]
    assert not (run / "exports/step_000020/left").exists()


def test_help_comes_at_once() -> None:
    """Process time, so that a busy machine does not fail it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = export("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    assert "checkpoint=STEP" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
