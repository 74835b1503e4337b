"""benchmarks/device.py on the CPU: every part runs in a process of its own and writes down what it has found; one that
fails or hangs keeps no other from running.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device_parts.aborts import answers_of
from benchmarks.device_parts.processes import run_process
from benchmarks.device_parts.settings import LIMITS_S, WORLD_LIMITS_S
from dhp_ray.comm.progress import Progress
from tests.checkout import ROOT
from tests.comm.test_conformance import is_running

CPU = torch.device("cpu")
TEST_S = 540
"""For all parts together: they take 60 s of two cores, and several times that where others use them."""
pytestmark = pytest.mark.timeout(TEST_S + 60)


def run_world(*arguments: str) -> subprocess.CompletedProcess[str]:
    """On two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmarks/device.py", "world"]
    return subprocess.run([*command, *arguments], cwd=ROOT, text=True, capture_output=True, timeout=2 * TEST_S,
                          check=False)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "benchmarks/device.py", *arguments], cwd=ROOT, text=True,
                          capture_output=True, timeout=TEST_S, check=False)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder and the process of one run of all parts."""
    folder = tmp_path_factory.mktemp("device")
    return folder, run("device=cpu", "preset=tiny", f"out={folder}", f"limit_s={TEST_S}")


@pytest.fixture
def record_of(done: tuple[Path, Any]) -> Callable[[str], dict[str, Any]]:
    return lambda part: json.loads((done[0] / f"{part}.json").read_text())


@pytest.mark.slow
def test_every_part_ends_and_the_command_with_0(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, process = done
    assert process.returncode == 0, process.stdout + process.stderr
    for part in LIMITS_S:
        record = json.loads((folder / f"{part}.json").read_text())
        assert record["status"] == ("not run" if part in ("tests", "nccl") else "done"), record["said"]
        assert record["command"] == f"python benchmarks/device.py device=cpu preset=tiny out={folder} limit_s={TEST_S}"
        assert record["device"].startswith("cpu: ")
        assert record["versions"]["torch"] == torch.__version__
        assert f"\n{part}: {record['status']} after {record['seconds']:.1f} s" in process.stdout
        assert f"\n| {part} | {record['status']} | " in process.stdout
        assert (folder / f"{part}.log").exists()


@pytest.mark.slow
def test_parts_for_cuda_alone_say_why_they_did_not_run(record_of: Callable[[str], dict[str, Any]]) -> None:
    assert [record_of(part)["said"] for part in ("tests", "nccl")] == ["no CUDA device"] * 2


@pytest.mark.slow
def test_attention_is_plain_attention(record_of: Callable[[str], dict[str, Any]]) -> None:
    found = record_of("attention")
    assert found["matrix_rate_tflops"] > 0
    for figures in found["figures"].values():
        assert figures["error"] < 1e-5
        assert figures["forward_share"] > 0
        assert figures["plain_backward_s"] > 0


@pytest.mark.slow
def test_a_step_computes_what_plain_transformers_does(record_of: Callable[[str], dict[str, Any]]) -> None:
    found = record_of("step")
    assert sorted(found["loss_errors"]) == ["1k, text", "1k, text and images", "256, text", "256, text and images"]
    assert max(found["loss_errors"].values()) < 1e-4
    assert len(found["figures"]) == 8
    for name, figures in found["figures"].items():
        assert figures["tokens"] == (1024 if name.startswith("1k") else 256)
        assert figures["share_of_matrix_rate"] > 0
        assert figures["losses"][1] < figures["losses"][0]
    assert found["predicted_resident_bytes"] == 32 * found["num_parameters"]
    assert "activations" in found["missing_from_prediction"]


@pytest.mark.slow
def test_nothing_is_read_before_the_totals(record_of: Callable[[str], dict[str, Any]]) -> None:
    figures = record_of("synchronisations")["figures"]
    assert figures == {f"{contents}, all": {"reads": 0} for contents in ("text", "text and images")}


@pytest.mark.slow
def test_degrees_agree_with_one_rank(record_of: Callable[[str], dict[str, Any]]) -> None:
    figures = record_of("parity")["figures"]
    assert {(found["transport"], found["degree"]) for found in figures.values()} == {
        (transport, degree) for transport in ("pool", "parent") for degree in (1, 2, 3, 4)}
    assert max(found["worst"] for found in figures.values()) < 1e-5


@pytest.mark.slow
def test_a_wait_for_a_lost_peer_ends_by_the_abort(record_of: Callable[[str], dict[str, Any]]) -> None:
    figures = record_of("abort")["figures"]
    assert sorted(figures) == ["asynchronous, peer is killed", "asynchronous, peer never joins"]
    for found in figures.values():
        assert found["blocked_s"] > 1.4
        assert found["ended_s"] < 2.0
        assert found["raised"] == "AbortedError"
        assert found["doing"] == "step 3, shards of other ranks"


@pytest.mark.slow
@pytest.mark.timeout(2 * TEST_S + 60)
def test_two_ranks_show_all_that_a_world_has_to(tmp_path: Path) -> None:
    process = run_world("device=cpu", "preset=tiny", "groups=6", f"out={tmp_path}", f"limit_s={TEST_S}")
    assert process.returncode == 0, process.stdout + process.stderr
    records = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in WORLD_LIMITS_S}
    for part, record in records.items():
        assert record["status"] == "done", record["said"]
        assert process.stdout.count(f"\n{part}: done after ") == 1
    figures = {part: record["figures"] for part, record in records.items()}
    assert sorted((found["transport"], found["degree"]) for found in figures["degrees"].values()) == [
        (transport, degree) for transport in ("parent", "pool") for degree in (1, 2)]
    assert set(figures["engines"]) == {"step", "micro_batch"}
    assert max(error for found in figures["engines"].values() for error in found.values()) < 1e-5
    assert set(figures["messages"]) == {"4096", "65536", "1048576"}
    assert all(found["with_s"] > 0 for found in figures["ring"].values())
    assert figures["groups"]["groups"]["count"] == 6
    for part in ("killed", "stopped"):
        (found,) = figures[part].values()
        assert found["raised"] == "AbortedError"
        assert json.loads((tmp_path / "rank-1" / f"{part}.json").read_text())["said"] == f"{part} itself"
    assert set(figures["speed"]) == {f"{sync}, {planner}" for sync in ("step", "micro_batch")
                                     for planner in ("dhp", "static_best")}


@pytest.mark.slow
@pytest.mark.timeout(2 * TEST_S + 60)
def test_a_part_that_fails_on_all_ranks_keeps_none_from_the_next(tmp_path: Path) -> None:
    process = run_world("device=cpu", "preset=2b", "parts=speed,messages", f"out={tmp_path}", f"limit_s={TEST_S}")
    assert process.returncode == 1
    assert "speed: FAILED after " in process.stdout
    said = json.loads((tmp_path / "speed.json").read_text())["said"]
    assert "rank 1: SettingsError: preset: got '2b' for the CPU; allowed: auto, tiny" in said
    assert json.loads((tmp_path / "messages.json").read_text())["status"] == "done"


def test_a_part_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    process = run("device=cpu", "parts=attention,nccl", f"out={tmp_path}", "limit_s=0.05")
    assert process.returncode == 1
    for part in ("attention", "nccl"):
        record = json.loads((tmp_path / f"{part}.json").read_text())
        assert record["status"] == "failed"
        assert record["said"].startswith("over its limit of 0.05 s; ")
        assert f"\n{part}: FAILED after " in f"\n{process.stdout}"


@pytest.mark.parametrize(("command", "said"), [
    ("sleep 99 & echo $! > {pid}; sleep 99", "over its limit of 0.5 s"),
    ("sleep 99 & echo $! > {pid}; exit 3", "its process ended with 3"),
    ("sleep 99 & echo $! > {pid}; kill -SEGV $$", "its process died of SIGSEGV"),
])
def test_nothing_of_a_part_is_left_running(tmp_path: Path, command: str, said: str) -> None:
    pid = tmp_path / "pid"
    begin = time.monotonic()
    assert run_process(["bash", "-c", command.format(pid=pid)], tmp_path / "log", 0.5) == said
    assert time.monotonic() - begin < 10.0
    deadline = time.monotonic() + 5.0
    while is_running(int(pid.read_text())):
        assert time.monotonic() < deadline


TESTS_OF_A_DEVICE = {
    "passes": "def test_it(): assert True",
    "fails": "def test_it(): assert 1 == 2, 'the sum is off'",
    "skips": "import pytest\ndef test_it(): pytest.skip('no second device')",
    "cannot_be_imported": "import no_such_module",
}


@pytest.mark.parametrize(("kinds", "said"), [
    ([*TESTS_OF_A_DEVICE], "CheckError: 2 of 4 tests failed, the first is test_cannot_be_imported.py"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (["passes", "skips"], "1 tests passed, 1 skipped"),
        (["skips"], "NotRun: all 1 tests skipped themselves: no second device"),
        (["passes", "fails"], "CheckError: 1 of 2 tests failed, the first is test_fails.py::test_it"),
        ([], "CheckError: pytest -k passes ran no test (exit status 5)"))),
])
def test_tests_are_written_down_as_they_end(tmp_path: Path, kinds: list[str], said: str) -> None:
    files = [tmp_path / f"test_{kind}.py" for kind in kinds]
    for kind, file in zip(kinds, files):
        file.write_text(TESTS_OF_A_DEVICE[kind])
    program = ("import sys; from pathlib import Path; from benchmarks.device_parts import outcomes, record\n"
               "outcomes.ROOT = Path(sys.argv[1])\n"
               "try: said = outcomes.run_tests(record.Record(Path(sys.argv[1]), 'tests', '', 'cpu'), sys.argv[2:])\n"
               "except Exception as error: said = f'{type(error).__name__}: {error}'\n"
               "print(said)")
    arguments = [str(file) for file in files] or ["-k", "passes"]
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), *arguments], cwd=tmp_path, text=True,
                          capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines()[-1] == said
    figures = json.loads((tmp_path / "tests.json").read_text())["figures"]
    assert {name.partition("::")[0]: found["outcome"] for name, found in figures.items()} == {
        f"test_{kind}.py": {"passes": "passed", "skips": "skipped"}.get(kind, "failed") for kind in kinds}
    reasons = {"test_fails.py::test_it": "the sum is off", "test_cannot_be_imported.py": "No module named"}
    for name in reasons.keys() & figures.keys():
        assert reasons[name] in figures[name]["reason"]


def test_a_control_thread_that_is_held_up_is_seen() -> None:
    held = answers_of(Progress(), lambda seconds: time.sleep(0.5) is None, 3.0)
    assert held.late_s("cpu") == held.late_s("cuda") > 0.4
    free = answers_of(Progress(), lambda seconds: bool(time.sleep(seconds)), 0.5)
    assert free.late_s("cpu") < 0.1


def test_an_error_of_a_part_is_one_line(tmp_path: Path) -> None:
    process = run("device=cpu", "preset=2b", "parts=step", f"out={tmp_path}", "limit_s=60")
    record = json.loads((tmp_path / "step.json").read_text())
    assert process.returncode == 1
    assert record["status"] == "failed"
    assert record["said"] == "SettingsError: preset: got '2b' for the CPU; allowed: auto, tiny"


def test_help_comes_without_torch() -> None:
    program = ("import sys, runpy; sys.argv = ['device.py', '--help']\n"
               "try: runpy.run_path('benchmarks/device.py', run_name='__main__')\n"
               "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)")
    begin = time.process_time()
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=True)
    assert time.process_time() - begin < 1.0
    assert "device=cpu preset=tiny" in shown.stdout


@pytest.mark.parametrize(("argument", "said"), [
    ("devise=cpu", "got 'devise=cpu'; allowed: key=value with key of device, preset, parts, out, limit_s, groups"),
    ("device=npu", "device: got 'npu'; allowed: auto, cuda, cpu"),
    ("parts=step,speed", "parts: got 'speed'; allowed: tests, attention, step, synchronisations, parity, abort, nccl"),
    ("limit_s=long", "limit_s: got 'long'; allowed: seconds"),
    ("groups=many", "groups: got 'many'; allowed: a number"),
    ("world", "world: needs torchrun; allowed: python -m torch.distributed.run --nproc-per-node 8 benchmarks/device.py "
              "world"),
])
def test_a_setting_that_is_wrong_is_an_error_of_one_line(argument: str, said: str) -> None:
    process = run(argument)
    assert process.returncode == 2
    assert process.stderr == f"error: {said}\n"


def test_a_world_of_one_rank_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    process = run("world", "device=cpu", "parts=messages")
    assert process.returncode == 2
    assert process.stderr == "error: world: got 1 rank; allowed: two or more\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error_of_one_line() -> None:
    process = run("device=cuda")
    assert process.returncode == 2
    assert process.stderr == ("error: device: got cuda, but this machine has no CUDA device that torch can use; "
                              "allowed here: cpu, auto\n")
