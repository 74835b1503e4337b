from __future__ import annotations

import socket

import pytest
import ray

from dhp_ray.data import lost_nodes
from dhp_ray.data.lost_nodes import lose_nodes, unnoticed, unnoticed_loss


def test_ray_notices_a_loss_later_than_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has lost its workers may be there all the same."""
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        port = raylet.getsockname()[1]
        there = {"NodeID": "far", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        monkeypatch.setattr(ray, "nodes", lambda: [there | {"Alive": alive}])
        monkeypatch.setattr(lost_nodes, "lost", set())
        alive = True
        assert not unnoticed_loss()
        lose_nodes({"far"}, ())
        assert not unnoticed_loss()
    assert unnoticed_loss()
    assert unnoticed({"far", "near"}) == {"far"}
    alive = False
    assert not unnoticed_loss()
