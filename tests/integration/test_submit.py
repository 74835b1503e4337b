"""The user's path: `ray job submit` of docs/clusters.md to a running cluster of two nodes, its logs, stopping,
submitting again, and what is left behind.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import copy_checkout
from tests.integration.jobs import ROOT, ledger, lines, losses
from tests.readme import the_block

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SMALL = ("data.synthetic.num_samples=48", "data.synthetic.max_tokens=700", "data.synthetic.long_median_tokens=500")
# the first is the job manager's, the second each rank's
VARIABLES = '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120", "GLOO_LOG_LEVEL": "INFO"}}'
MODE, GENERATE, _, SUBMIT, _ = the_block("", "ray start --head").splitlines()
"""The commands of docs/clusters.md for a cluster of this machine. `ray start` and `ray stop` are not run: they would
take this machine's other clusters along.
"""
WORDS = shlex.split(SUBMIT)
OPTIONS, ENTRYPOINT = WORDS[3:WORDS.index("--")], WORDS[WORDS.index("--") + 1:]


@dataclass
class SubmitCluster:
    """The `ray` command as a user at the checkout has it, with the address of the cluster's dashboard."""

    dashboard: str
    checkout: Path
    environment: dict[str, str]
    token: str

    def ray(self, *arguments: str, timeout_s: float = 400.0) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("ray")), *arguments]
        return subprocess.run(command, cwd=self.checkout, env=self.environment, text=True, capture_output=True,
                              timeout=timeout_s, check=False)

    def submit(self, name: str, *entrypoint: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        shown = [self.dashboard if word == "http://127.0.0.1:8265" else word for word in OPTIONS]
        options = ["--submission-id", name, "--runtime-env-json", VARIABLES] + ([] if wait else ["--no-wait"])
        return self.ray("job", "submit", *shown, *options, "--", *entrypoint)

    def job(self, name: str) -> dict[str, Any]:
        """What the dashboard knows of a job."""
        request = urllib.request.Request(f"{self.dashboard}/api/jobs/{name}",
                                         headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def status(self, name: str) -> str:
        return str(self.job(name)["status"])

    def actors_left(self) -> list[str]:
        """What is not of Ray itself: its Data library keeps actors (their names begin with _) for the cluster's life,
        and the job manager one for a moment.
        """
        done = self.ray("list", "actors", "--address", self.dashboard, "--filter", "state!=DEAD", "--format", "json")
        assert done.returncode == 0, done.stderr
        actors = [actor for actor in json.loads(done.stdout)
                  if not actor["class_name"].startswith(("_", "JobSupervisor"))]
        return [f"{actor['class_name']} {actor['state']} of job {actor['job_id']}" for actor in actors]

    def wait_for_no_actors(self) -> None:
        """Ray needs a moment to tell that the last ones are dead."""
        deadline = time.monotonic() + 30
        while (left := self.actors_left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert left == []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git would give a stranger, and beside it what a user's folder collects: an environment and runs, which must
    not be uploaded.
    """
    folder = tmp_path_factory.mktemp("checkout")
    copy_checkout(folder)
    for name in (".venv/lib/library.so", "runs/default/checkpoints/step_000001/weights", "my/images/cat.png"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(bytes(1_000_000))
    return folder


@pytest.fixture(scope="module")
def cluster(checkout: Path) -> Iterator[SubmitCluster]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sessions = tempfile.mkdtemp(prefix="ray_")  # short: Ray puts sockets there
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "VIRTUAL_ENV")}
    environment |= {"RAY_TMPDIR": sessions, "HOME": sessions, "OMP_NUM_THREADS": "1",
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= dict([MODE.removeprefix("export ").split("=")])
    # below that HOME
    token = subprocess.run(["bash", "-c", GENERATE], env=environment, text=True, capture_output=True,
                           check=True).stdout.strip()
    assert (Path(sessions) / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    process = subprocess.Popen([sys.executable, str(ROOT / "tests" / "integration" / "dashboard_cluster.py"),
                                str(port)], env=environment, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        found = SubmitCluster(json.loads(process.stdout.readline())["dashboard"], checkout, environment, token)
        wait_for_agents(found)
        yield found
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        shutil.rmtree(sessions, ignore_errors=True)


def until(what: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"nothing within {timeout_s} s"
        time.sleep(0.2)


def wait_for_agents(cluster: SubmitCluster, timeout_s: float = 300.0) -> None:
    """The agents that start jobs come up after the dashboard; until then submitting is answered by "No available
    agent".
    """
    deadline = time.monotonic() + timeout_s
    while True:
        probe = cluster.submit(f"probe-{time.time_ns()}", "true")
        if probe.returncode == 0:
            return
        assert time.monotonic() < deadline, probe.stdout + probe.stderr
        time.sleep(2)


@pytest.fixture(scope="module")
def arguments(checkout: Path) -> list[str]:
    """The documented entry point on a small set, for a run of 24 steps on two workers; `run.dir` may follow again."""
    shown = [word.replace("$PWD", str(checkout)) for word in ENTRYPOINT]
    [data] = [word for word in shown if word.startswith("data.path=")]
    subprocess.run([sys.executable, str(ROOT / "jobs" / "prepare_data.py"), data, *SMALL], check=True,
                   capture_output=True)
    return [*shown, "cluster.num_workers=2", "planner.tokens_per_rank=400", "batch.global_samples=4",
            "run.steps=24", "checkpoint.every_steps=50"]


def test_what_is_uploaded(cluster: SubmitCluster) -> None:
    done = cluster.submit("listing", "python", "-c", "import os; print(sorted(os.listdir('.')))")
    assert done.returncode == 0, done.stdout + done.stderr
    names = re.findall(r"\[('.*')\]", done.stdout)[-1]
    for name in ("jobs", "dhp_ray", "conf", "pyproject.toml"):
        assert f"'{name}'" in names
    for name in (".venv", "runs", "my", ".git"):
        assert f"'{name}'" not in names


def test_submitted_watched_stopped_and_submitted_again(
    cluster: SubmitCluster, arguments: list[str], tmp_path: Path
) -> None:
    undisturbed = cluster.checkout / "runs" / "submitted"  # the documented run.dir
    whole = cluster.submit("whole", *arguments)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "step 24/24 loss" in whole.stdout
    logs = cluster.ray("job", "logs", "--address", cluster.dashboard, "whole").stdout
    assert all(f"step {step}/24 loss" in logs for step in range(1, 25))
    # as the variable GLOO_LOG_LEVEL has it
    said = {int(pid) for pid in re.findall(r"\(Worker pid=(\d+)[^)]*\)\S* \[[^]]*gloo/\S*\] INFO Rank \d", logs)}
    assert said & {rank["pid"] for rank in json.loads((undisturbed / "cluster.json").read_text())["ranks"]}, (
        "what ranks print is in the job's log"
    )
    assert cluster.status("whole") == "SUCCEEDED"
    cluster.wait_for_no_actors()

    folder = tmp_path / "stopped"
    assert cluster.submit("first", *arguments, f"run.dir={folder}", wait=False).returncode == 0
    until(lambda: len(lines(folder, "ledger.jsonl")) >= 3, 240)
    stopped = cluster.ray("job", "stop", "--address", cluster.dashboard, "first")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until(lambda: cluster.status("first") == "STOPPED", 150)
    done = len(ledger(folder))
    assert 3 <= done < 24
    assert (folder / "checkpoints" / f"step_{done:06d}").exists(), "stopping saves"
    cluster.wait_for_no_actors()

    again = cluster.submit("second", *arguments, f"run.dir={folder}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resuming after step {done}" in again.stdout
    assert ledger(folder) == ledger(undisturbed)
    assert losses(folder) == pytest.approx(losses(undisturbed), rel=2e-3)
    assert (folder / "model" / "model.safetensors").exists()
    cluster.wait_for_no_actors()


def test_a_job_that_fails_says_so(cluster: SubmitCluster, arguments: list[str], tmp_path: Path) -> None:
    """One line in the log, and the exit status in the job's."""
    for name, change, words, status in (("typo", "train.learning_rat=1", "error: train.learning_rat: no such key", 2),
                                        ("too-many", "cluster.num_workers=90", "error: cluster.num_workers=90: needs",
                                         1)):
        done = cluster.submit(name, *arguments, f"run.dir={tmp_path / name}", change, "cluster.start_timeout_s=2")
        assert done.returncode == 1, done.stdout
        assert next(line for line in done.stdout.splitlines() if line.startswith("error: ")).startswith(words)
        assert "Traceback" not in done.stdout
        found = cluster.job(name)
        assert (found["status"], found["driver_exit_code"]) == ("FAILED", status)
    cluster.wait_for_no_actors()


def test_without_the_token_nothing_is_taken(cluster: SubmitCluster, tmp_path: Path) -> None:
    stranger = replace(cluster, environment=cluster.environment | {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"})
    done = stranger.submit("strange", "true")
    assert done.returncode != 0
    assert "Authentication required" in done.stdout + done.stderr
    assert "strange" not in cluster.ray("job", "list", "--address", cluster.dashboard).stdout


def test_a_dashboard_that_is_not_there_is_the_users_to_see(cluster: SubmitCluster) -> None:
    done = cluster.ray("job", "submit", "--address", "http://127.0.0.1:1", "--", "true")
    assert done.returncode != 0
    assert "Failed to connect to Ray at address: http://127.0.0.1:1" in done.stderr + done.stdout
