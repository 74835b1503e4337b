"""What tests of several packages need from outside: a local Ray cluster, a bare configuration, test data, an S3 server;
skips for what a machine lacks.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dhp_ray.runtime.job.head import LOCAL_SETTINGS
from dhp_ray.storage import Folder
from tests import ranks
from tests.processes import starts_processes

RUN_RANKS = {"run_ranks", "run_processes", "run_tensors"}
"""Of a test module that has one of these names, tests run ranks."""

gc.disable()  # until all is imported: pytest_collection_finish
os.environ.setdefault("RAY_worker_niceness", "0")  # as in cluster.yaml
# a local ray.init would leave a token file behind that later clusters demand
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if find_spec("ray"):  # the core's tests also run without it: test_clean_environment.py
    # A test without a cluster must not join, by a call of Ray, the one that another test has started: once that cluster
    # is gone, Ray ends the process. Ray reads the variable when it is imported; processes that tests start may connect.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray

    del os.environ["RAY_ENABLE_AUTO_CONNECT"]
# a shell starts background commands so, and every process that a test starts would inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def needs_ray(file: Path) -> bool:
    return "ray_cluster" in file.read_text()


@cache
def shares_reference(file: Path) -> bool:
    return "reference: Callable" in file.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests run on several processes, file by file, in the order of `pytest_collection_modifyitems`: all files that
    need Ray on one of them, so that there is one cluster, and all that hold ranks against the same reference.
    """
    from xdist.scheduler import LoadScopeScheduling

    class OneCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if needs_ray(config.rootpath / file):
                return "ray"
            return "reference" if shares_reference(config.rootpath / file) else file

    config.option.loadscopereorder = False
    return OneCluster(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Once all files that need Ray are done on this process the cluster ends: it would take a twentieth of a core from
    the others.
    """
    if nextitem and hasattr(item.config, "workerinput") and needs_ray(item.path) and not needs_ray(nextitem.path):
        end_cluster()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # no collection need walk through what is imported
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker("processes")
    if hasattr(config, "workerinput"):  # what takes long first: at the end no process waits long for the others
        starting = {item.path for item in items if item.get_closest_marker("processes")}
        items.sort(key=lambda item: (not needs_ray(item.path), item.path not in starting))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of comm, model and train that run ranks do so twice: also over a backend that behaves as a device's."""
    folder = Path(metafunc.module.__file__).relative_to(Path(__file__).parent).parts[0]
    if folder in ("comm", "model", "train") and RUN_RANKS & vars(metafunc.module).keys():
        twice = metafunc.definition.get_closest_marker("gloo") is None
        asynchronous = [pytest.param("asynchronous", marks=pytest.mark.slow)] if twice else []
        metafunc.parametrize("backend_of_ranks", ["gloo", *asynchronous], indirect=True)


@pytest.fixture(autouse=True)
def backend_of_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks of `tests/ranks.py` exchange over."""
    monkeypatch.setattr(ranks, "BACKEND", getattr(request, "param", "gloo"))


def end_cluster() -> None:
    if find_spec("ray") and ray.is_initialized():
        os.environ.pop("RAY_ADDRESS", None)
        gc.collect()  # an executor of Ray Data that is collected later would start Ray again
        ray.shutdown()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of 2 CPUs, with the settings of one that a run starts, whose processes take less and are kept for
    the next test; entry points started as processes find it through RAY_ADDRESS.
    """
    for name, value in LOCAL_SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init("local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    yield
    end_cluster()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that give a valid configuration without any file of conf/."""
    path = tmp_path_factory.mktemp("config") / "bare.yaml"
    path.write_text("model: {preset: tiny}\n")
    return ["--config", str(path)]


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real images, conversations and lengths; `DHP_RAY_TEST_DATA` names their folder."""
    if not os.environ.get("DHP_RAY_TEST_DATA"):
        pytest.skip("DHP_RAY_TEST_DATA names no folder with nlvr/, lengths/ and cost/")
    return Path(os.environ["DHP_RAY_TEST_DATA"])


@pytest.fixture(scope="session")
def object_store() -> Iterator[str]:
    """The options that a URI `s3://bucket/...` needs to reach an S3 server that runs for the tests; skips where moto is
    not installed.
    """
    pytest.importorskip("moto.server", reason="moto is not installed: no S3 server to test against")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    before = {name: os.environ.get(name) for name in keys}
    os.environ.update(keys)
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                urllib.request.urlopen(request).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "moto's server does not answer"
                time.sleep(0.2)
        yield f"?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    finally:
        server.kill()
        server.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(params=["local", "file://", "s3://"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "local":
        return Folder(str(tmp_path / "run"))
    if request.param == "file://":
        return Folder(f"file://{tmp_path}/run")
    options = request.getfixturevalue("object_store")
    return Folder(f"s3://bucket/{tmp_path.name}/run{options}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB, in memory; skips where this user may not mount one."""
    place = tmp_path / "small_disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True,
                          text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)
