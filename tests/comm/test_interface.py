from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dhp_ray.comm.world import address_towards, interface_of, listen_on


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


def test_gloo_listens_there_alone() -> None:
    """A rank of its own process: every socket that it listens on is at the address."""
    program = (
        "import sys, os, torch.distributed as dist; from dhp_ray.comm.world import listen_on; "
        "listen_on('127.0.0.1')\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "inodes = {os.readlink(f'/proc/self/fd/{fd}')[8:-1] for fd in os.listdir('/proc/self/fd') if "
        "os.path.exists(f'/proc/self/fd/{fd}')\n"
        "          and os.readlink(f'/proc/self/fd/{fd}').startswith('socket:')}\n"
        "for kind in ('tcp', 'tcp6'):\n"
        "    for line in open(f'/proc/net/{kind}').read().splitlines()[1:]:\n"
        "        words = line.split()\n"
        "        if words[3] == '0A' and words[9] in inodes: print(words[1].split(':')[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True,
                          text=True, timeout=120, check=True)
    assert set(done.stdout.split()) == {"0100007F"}
