"""The entry points' own main functions, given anything: an exit status and one line, never a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkout import ROOT, job_of
from tests.test_config_fuzz import names, values

PLAN_ARGUMENTS = ["num_ranks", "ranks_per_node", "nodes", "speeds", "sync", "planner", "cost", "out", "lengths",
                  "replay"]
texts = st.text(max_size=20) | values.map(lambda value: yaml.safe_dump(value, default_flow_style=True).strip())
words = st.builds("{}={}".format, names,
                  texts) | st.text(max_size=20) | st.builds("--config={}".format, st.text(max_size=8))
fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def ended(main: Callable[[list[str]], int], argv: list[str]) -> tuple[int, str, list[str]]:
    """Exit status, what was printed, and the lines on standard error."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main(argv)
    return status, output.getvalue(), errors.getvalue().splitlines()


@pytest.mark.parametrize("name", ["train", "prepare_data", "evaluate"])
@fuzz
@given(argv=st.lists(words.filter(lambda word: word not in ("-h", "--help")), max_size=4),
       last=st.sampled_from(["run.steps=-1", "seed=x", "run.resume=maybe"]))
def test_any_overrides_end_in_one_line(name: str, argv: list[str], last: str) -> None:
    """Among them one that is wrong, and comes last, so that nothing starts."""
    status, output, errors = ended(job_of(name).main, [*argv, last])
    assert (status, output) == (2, "")
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert ": " in errors[0].removeprefix("error: ")


@fuzz
@given(argv=st.lists(st.builds("{}={}".format, st.sampled_from(PLAN_ARGUMENTS), st.text(max_size=12))
                     | st.text(max_size=12), min_size=1, max_size=4))
def test_any_arguments_of_a_plan_end_in_one_line(argv: list[str]) -> None:
    words = [word for word in argv if word not in ("-h", "--help")] or ["x"]
    status, output, errors = ended(job_of("plan").main, words)
    assert (status, output) == (2, "")
    assert len(errors) == 1
    assert errors[0].startswith("error: ")


HOOK = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == os.environ["AT_IMPORT_OF"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""
"""A module that Python imports at its start: Ctrl-C comes as the process begins to import another one."""


@pytest.mark.parametrize(("name", "module"), [
    ("train", "omegaconf"), ("evaluate", "omegaconf"), ("prepare_data", "omegaconf"), ("measure", "omegaconf"),
    ("export", "dhp_ray.config"), ("report", "dhp_ray.config"), ("merge", "dhp_ray.config"),
    ("plan", "dhp_ray.schema"), ("plan", "numba"), ("prepare_data", "pyarrow.parquet"), ("simulate", "dhp_ray.config")])
def test_ctrl_c_while_a_command_imports_is_one_line(name: str, module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    (tmp_path / "lengths.csv").write_text("num_tokens\n7\n")
    words = {"plan": ["lengths=lengths.csv", "num_ranks=1"], "merge": ["adapter=x", "out=y"],
             "prepare_data": ["data.path=x.parquet"]}.get(name, ["run.dir=x"])
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "AT_IMPORT_OF": module}
    done = subprocess.run([sys.executable, str(ROOT / "jobs" / f"{name}.py"), *words], cwd=tmp_path, env=environment,
                          text=True, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: stopped")
    assert "Ctrl-C" in line


@pytest.mark.parametrize(("words", "line"), [
    (["train.py", "run.dir={folder}/file"], "run.dir: {folder}/file is a file; allowed: a folder or URI"),
    (["evaluate.py", "model.path={folder}/model", "eval.path={folder}/file", "eval.output={folder}"],
     "eval.output: {folder} is a folder; allowed: a file"),
    (["measure.py", "model=tiny", "cluster.device=cpu", "ranks=4096"], "ranks: got 4096; this machine has "),
    (["measure.py", "model=tiny", "cluster.device=cpu", "out={folder}/file/x.yaml"],
     "out: {folder}/file/x.yaml cannot be written: Not a dir"),
    (["merge.py", "adapter={folder}/none", "out={folder}/new"], "adapter: {folder}/none/adapter_config.json cannot "),
    (["export.py", "run.dir={folder}/file"], "run.dir: {folder}/file is a file; allowed: a folder or URI"),
    (["export.py", "run.dir={folder}/run"], "out: {folder}/run/exports/step_000020 exists and is not an empty folder"),
    (["export.py", "run.dir={folder}/run", "checkpoint=latest"],
     "out: {folder}/run/exports/step_000020 exists and is not an empty folder"),
    (["export.py", "run.dir={folder}/run", "checkpoint=last"], "checkpoint: got 'last'; allowed: latest, or the step")])
def test_refusals_come_before_torch_and_ray(words: list[str], line: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    for file, text in (("exports/step_000020/config.json", "{}"), ("config.yaml", "model: {preset: tiny}"),
                       ("checkpoints/step_000020/manifest.json", "{}")):
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text(text)
    script, *rest = (word.format(folder=tmp_path) for word in words)
    data = ["data=llava", f"data.path={tmp_path / 'file'}"] if script == "train.py" else []
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-X", "importtime", str(ROOT / "jobs" / script), *data, *rest], cwd=ROOT,
                          env=environment | {"TMPDIR": str(tmp_path)}, text=True, capture_output=True, timeout=120,
                          check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = [text for text in done.stderr.splitlines() if not text.startswith("import time:")]
    assert done.returncode in (1, 2)
    assert len(said) == 1
    assert said[0].startswith(f"error: {line.format(folder=tmp_path)}")
    imported = {text.rpartition("|")[2].strip().partition(".")[0] for text in done.stderr.splitlines()}
    assert not imported & {"ray", "torch", "transformers"}
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0  # not 13, on a busy machine
