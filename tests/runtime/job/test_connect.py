"""Meeting Ray: a head that is gone is told within seconds; the rendezvous store listens on its node's address alone;
where a submitted job may write.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray._private.runtime_env.working_dir import WorkingDirPlugin
from ray._private.services import get_ray_address_from_environment
from ray._private.utils import check_version_info
from torch.distributed import TCPStore

from dhp_ray.config import upload_warning
from dhp_ray.runtime.job.head import HEAD_PATIENCE_S, LOCAL_SETTINGS, _reason, connect, named_head
from dhp_ray.runtime.job.job import rendezvous_store
from dhp_ray.runtime.messages import RunError
from tests.data.samples import talk, write_rows

ROOT = Path(__file__).parents[3]
IN_UPLOAD = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1")


@pytest.fixture
def dead_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


def plant(folder: Path, address: str) -> Path:
    """The file that `ray start` leaves in its temporary folder."""
    file = folder / "ray" / "ray_current_cluster"
    file.parent.mkdir(parents=True)
    file.write_text(address)
    return file


def data(folder: Path) -> list[str]:
    """Of a run that nothing is wrong with but its cluster."""
    return [
        "data=llava",
        f"data.path={write_rows(folder / 'rows.json', [{'conversations': talk('Name a colour.', 'Red.')}])}",
    ]


def test_a_dead_address_ends_a_run_with_one_line(dead_port: int, tmp_path: Path) -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "jobs/train.py", f"run.dir={tmp_path}", *data(tmp_path)], cwd=ROOT,
                          capture_output=True, text=True, timeout=60,
                          env=os.environ | {"RAY_ADDRESS": f"127.0.0.1:{dead_port}"}, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines() == [
        f"error: no Ray cluster at 127.0.0.1:{dead_port}, which RAY_ADDRESS names: [Errno 111] Connection refused; "
        "allowed: a running head (`ray start --head`), its address in RAY_ADDRESS, "
        "or RAY_ADDRESS=local for a cluster of this machine alone"
    ]
    assert time.monotonic() - started < 30  # of which all but a moment is importing Ray


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
@pytest.mark.parametrize("address", [None, "", "auto"])
def test_a_stale_file_is_named(
    variable: str, address: str | None, dead_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plant(tmp_path, f"127.0.0.1:{dead_port}\n")
    monkeypatch.setenv(variable, str(tmp_path))
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        RunError,
        match=rf"no Ray cluster at 127.0.0.1:{dead_port}, which {file} names: .*`ray stop`, or deleting it, clears it",
    ):
        connect()


def test_a_head_that_swallows_connections_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue of connections: what is sent to it is dropped, as a firewall does."""
    with socket.create_server(("127.0.0.2", 0), backlog=0) as server, socket.create_connection(server.getsockname()):
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.2:{server.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(RunError, match="which RAY_ADDRESS names: timed out; allowed: a running head"):
            connect()
    assert HEAD_PATIENCE_S - 0.5 < time.monotonic() - started < 3 * HEAD_PATIENCE_S


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_the_loopback_stands_for_the_nodes_address_as_in_ray(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ray.util.get_node_ip_address() == "127.0.0.1":
        pytest.skip("this machine has no network but the loopback")
    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        monkeypatch.setenv("RAY_ADDRESS", f"{name}:{tunnel.getsockname()[1]}")
        with pytest.raises(RunError, match=rf"no Ray cluster at {name}:\d+, which RAY_ADDRESS names: .*refused"):
            connect()


@pytest.mark.parametrize("address", ["no.such.host.invalid:6379", "a..b:6379", "127.0.0.1:99999", "[::1]:1"])
def test_an_address_that_leads_nowhere(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError, match=r"^no Ray cluster at ") as error:
        connect()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"RAY_ADDRESS": "10.0.0.1:6379", "RAY_TMPDIR": "first"}, "10.0.0.1:6379"),
        ({"RAY_ADDRESS": "local", "RAY_TMPDIR": "first"}, "local"),
        ({"RAY_TMPDIR": "first", "TMPDIR": "second"}, "10.0.0.2:1"),
        ({"TMPDIR": "second"}, "10.0.0.2:2"),
        ({"RAY_TMPDIR": "none"}, ""),
    ],
)
def test_the_address_is_the_one_that_ray_takes(
    variables: dict[str, str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "first", "10.0.0.2:1")
    plant(tmp_path / "second", "10.0.0.2:2")
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert named_head()[0] == found == (get_ray_address_from_environment(None, None) or "")


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_the_store_listens_on_its_address_alone(host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {host}")
    before = listening()
    store = rendezvous_store(host)
    hexadecimal = {"127.0.0.2": "0200007F", "::1": "00000000000000000000000001000000"}[host]
    assert listening() - before == {f"{hexadecimal}:{store.port:04X}"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=5)
    rank = TCPStore(host, store.port, is_master=False)
    rank.set("generation", "1")
    assert store.get("generation") == b"1"
    del rank, store
    gc.collect()
    assert listening() == before


def listening() -> set[str]:
    """ADDRESS:PORT, as the kernel writes them, of every socket that this process listens on."""
    folder = Path("/proc/self/fd")
    inodes = {os.readlink(link)[8:-1] for link in folder.iterdir() if os.path.lexists(link)
              and os.readlink(link).startswith("socket:[")}
    words = [line.split() for kind in ("tcp", "tcp6")
             for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]]
    return {row[1] for row in words if row[3] == "0A" and row[9] in inodes}


def test_an_address_of_elsewhere_is_no_place_for_the_store() -> None:
    with pytest.raises(
        RunError,
        match=r"the rendezvous store cannot listen at 198.51.100.77, the node's address in Ray: .*; "
              r"allowed: an address",
    ):
        rendezvous_store("198.51.100.77")


@pytest.mark.parametrize("folder", ["runs/mine", "mine", "./runs", "../runs"])
def test_a_relative_output_in_an_upload_is_warned_of(folder: str) -> None:
    assert re.fullmatch(
        rf"warning: eval.output={folder} is relative: it lies in {IN_UPLOAD}/jobs, .*; give an absolute path or a URI "
        "that every node reaches",
        upload_warning("eval.output", folder, IN_UPLOAD / "jobs"),
    )
    assert not upload_warning("eval.output", folder, Path("/home/me/dhp_ray"))


@pytest.mark.parametrize("folder", ["/shared/runs/mine", "~/runs", "s3://bucket/runs", "file:///shared/runs"])
def test_other_outputs_are_fine_in_an_upload(folder: str) -> None:
    assert not upload_warning("eval.output", folder, IN_UPLOAD)


def test_a_job_in_an_upload_needs_a_run_folder_elsewhere(tmp_path: Path, dead_port: int) -> None:
    """In the folder that Ray itself would unpack it to."""
    plugin = WorkingDirPlugin(str(tmp_path), None)  # type: ignore[arg-type]
    upload = Path(plugin._resources_dir) / "_ray_pkg_1"
    upload.mkdir()
    done = subprocess.run([sys.executable, str(ROOT / "jobs" / "train.py"), *data(tmp_path)], cwd=upload,
                          capture_output=True, text=True, timeout=60,
                          env=os.environ | {"RAY_ADDRESS": f"127.0.0.1:{dead_port}"}, check=False)
    assert done.stdout == ""
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: run.dir: got 'runs/default', which is relative: ")
    assert done.stderr.count("\n") == 1


def test_a_cluster_of_other_versions_is_told_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, of the words that Ray has."""
    with pytest.raises(RuntimeError) as caught:
        check_version_info({"ray_version": "2.9.1", "python_version": "3.8.7"}, "here", True, "minor")
    said = _reason(caught.value)
    assert "\n" not in said
    assert re.search(r"with: Ray: 2\.9\.1 Python: 3\.8\.7 This process .* Ray: [\d.]+ Python: [\d.]+$", said)


def test_a_cluster_that_is_joined_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """See test_local_cluster.py for one that is started here."""
    for name in LOCAL_SETTINGS:
        monkeypatch.setenv(name, "as it was")
        monkeypatch.delenv(name)
    asked: dict[str, object] = {}
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    with socket.create_server((ray.util.get_node_ip_address(), 0)) as head:
        host, port = head.getsockname()
        monkeypatch.setenv("RAY_ADDRESS", f"{host}:{port}")
        connect()
    assert asked["include_dashboard"] is False
    assert not [name for name in LOCAL_SETTINGS if name in os.environ]
