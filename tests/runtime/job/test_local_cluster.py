"""The cluster that a run starts by itself: signals to the run's process group do not reach it, and it ends with the
run, however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dhp_ray.runtime.job.head import LOCAL_SETTINGS
from dhp_ray.runtime.job.local_cluster import answer_of, end_cluster, start_cluster

ROOT = Path(__file__).parents[3]
RUN = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda *_: print("heard", flush=True))
from dhp_ray.runtime.job.head import _started, connect, disconnect
connect()
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
import ray
answer = ray.remote(lambda: "answer").options(num_cpus=0)
print(ray.get(answer.remote()), flush=True)
print(_started[0].pid, flush=True)
for line in sys.stdin:
    print(ray.get(answer.remote()), flush=True)
disconnect()
"""


class Run:
    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", RUN], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, start_new_session=True, cwd=ROOT,
                                        env=os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)})
        assert self.line() == "answer"
        self.session = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def ask(self) -> str:
        assert self.process.stdin is not None
        print("?", file=self.process.stdin, flush=True)
        return self.line()

    @property
    def cluster(self) -> list[int]:
        """The processes of the session that the cluster has."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(ValueError, OSError):
                if os.getsid(int(entry.name)) == self.session and "State:\tZ" not in (entry / "status").read_text():
                    found.append(int(entry.name))
        return found

    def all_are_gone(self) -> bool:
        deadline = time.monotonic() + 30
        while self.cluster and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.cluster


@pytest.fixture
def run() -> Iterator[Run]:
    begun = Run()
    yield begun
    if begun.process.poll() is None:
        begun.process.kill()
        begun.process.communicate()
    for process in begun.cluster:
        os.kill(process, signal.SIGKILL)


def test_signals_to_the_process_group_leave_the_cluster_and_kill_ends_it(run: Run) -> None:
    assert len(run.cluster) >= 4
    # its metrics and task events, and its dashboard, would take time from ranks that share the machine
    settings = {f"{name}={value}".encode() for name, value in LOCAL_SETTINGS.items()}
    servers = [place for place in (Path(f"/proc/{process}") for process in run.cluster)
               if (place / "comm").read_text().strip() in ("raylet", "gcs_server")]  # others write over theirs
    assert len(servers) == 2
    assert all(settings <= set((place / "environ").read_bytes().split(b"\0")) for place in servers)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.killpg(run.process.pid, number)
        assert run.line() == "heard"
    for process in run.cluster:  # as systemd and Slurm do: every process is sent it
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    time.sleep(1.0)
    assert run.ask() == "answer"
    run.process.kill()
    assert run.all_are_gone()


@pytest.mark.slow
def test_the_cluster_ends_with_the_run(run: Run) -> None:
    run.process.communicate()
    assert run.process.returncode == 0
    assert not run.cluster


def test_a_cluster_that_cannot_start_says_why_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all in the folder that the run was started in."""
    (tmp_path / "ray.py").write_text("def init(*_, **__): raise RuntimeError('no port is free\\nmore')\n")
    (tmp_path / "ray_spilled_objects_of_mine").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    program = start_cluster()
    assert answer_of(program) == {"error": "no port is free"}
    end_cluster(program)
    assert program.returncode == 0
    assert (tmp_path / "ray_spilled_objects_of_mine").exists()


def test_the_cluster_of_a_run_starts_before_the_run_imports_ray(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("def init(*_, **__): raise RuntimeError('started')\n")
    code = ("import sys; from dhp_ray.runtime.job import head; "
            "head.begin(); head.begin(); print('ray' in sys.modules); "
            "from dhp_ray.runtime.job.local_cluster import answer_of; "
            "print(*(answer_of(program)['error'] for program in head._started))")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                          env=os.environ | {"RAY_ADDRESS": "local", "PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.stdout == "False\nstarted\n"
