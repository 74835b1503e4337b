"""The network interface that a node's address belongs to: gloo must be told which one to listen on.

By default gloo looks up the host's name, which on many machines gives the loopback (other nodes then cannot reach the
rank) or a public address.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915
"""Linux's call for the IPv4 address of an interface."""


def interface_of(address: str) -> str:
    """Return the name of the interface with this IPv4 address; empty if none has it, or for another kind of address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # this interface has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that a connection to `host` would come from; empty if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def listen_on(address: str) -> None:
    """Let this process's gloo groups listen on the interface of `address`, unless GLOO_SOCKET_IFNAME names one already.
    """
    name = interface_of(address)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
