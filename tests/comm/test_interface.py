from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from dhp_ray.comm.world import address_towards, interface_of, listen_on
from tests.ranks import run_processes

pytestmark = pytest.mark.gloo("processes that exchange nothing")


def test_the_loopback_and_this_machines_address_have_interfaces() -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert interface_of("127.0.0.1") in names
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    address = address_towards("198.51.100.1", 9)
    if not address:
        pytest.skip("this machine has no network but the loopback")
    assert interface_of(address) in names


def test_nowhere_is_towards_nothing() -> None:
    assert address_towards("not a host", 9) == ""


@pytest.mark.parametrize("address", ["198.51.100.77", "::1", "not an address", ""])
def test_an_address_of_elsewhere_has_none(address: str) -> None:
    assert interface_of(address) == ""


def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    listen_on("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    listen_on("198.51.100.77")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    listen_on("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")


def listening(rank: int, port: int) -> set[str]:
    """The addresses of all sockets that a rank listens on."""
    listen_on("127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    places = [f"/proc/self/fd/{place}" for place in os.listdir("/proc/self/fd")]
    targets = [os.readlink(place) for place in places if os.path.exists(place)]
    inodes = {target[8:-1] for target in targets if target.startswith("socket:")}
    lines = [line.split() for kind in ("tcp", "tcp6")
             for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {words[1].partition(":")[0] for words in lines if words[3] == "0A" and words[9] in inodes}


def test_gloo_listens_there_alone() -> None:
    assert run_processes(listening, 1) == [{"0100007F"}]
