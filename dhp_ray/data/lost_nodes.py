"""Nodes that this process knows to be gone, seconds before Ray does: its head gives a node several health checks."""

from __future__ import annotations

import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import ray

LOOK_S = 0.2
"""Seconds after which a wait looks whether a node is gone."""

CONNECT_S = 1.5
"""Seconds that a raylet has to accept a connection: a packet may be lost, and is sent again after one second."""

lost: set[str] = set()
"""Nodes that this process was told are gone."""


def lose_nodes(gone: Collection[str], members: Collection[str]) -> None:
    """Take the nodes in `gone` for lost, until they are in `members`."""
    lost.update(gone)
    lost.difference_update(members)


def unnoticed_loss() -> bool:
    """Whether a node is gone and Ray does not know it yet: its tasks wait there, and it may send more."""
    return bool(lost) and bool(unnoticed(lost))


def unnoticed(nodes: Collection[str]) -> set[str]:
    """Those of the nodes that Ray takes for alive and whose raylet accepts no connection."""
    alive = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes()
             if node["Alive"] and node["NodeID"] in nodes}
    with ThreadPoolExecutor(32, "raylets") as threads:
        return {node for node, accepts in zip(alive, threads.map(_accepts, alive.values())) if not accepts}


def _accepts(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError:
        return False
    return True
