"""Descriptors that the processes of a node hand to one another."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm import node_files
from dhp_ray.comm.node_files import closing, exchanged
from dhp_ray.comm.node_memory import NodeMemoryError
from dhp_ray.comm.world import is_peer_loss
from tests.ranks import run_processes, run_ranks


def in_world(rank: int, port: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return function(rank, world_size, *arguments)


def exchange_files(rank: int, world_size: int) -> list[str]:
    own = os.memfd_create("own")
    os.write(own, f"of {rank}".encode())
    before = len(os.listdir("/proc/self/fd"))
    files = exchanged(own, range(10, 10 + world_size), rank, dist.group.WORLD)
    texts = ["own" if file < 0 else os.pread(file, 100, 0).decode() for file in files]
    with closing(files):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
    return texts


def test_every_rank_gets_a_descriptor_of_every_other() -> None:
    assert run_ranks(exchange_files, 3, 3) == [
        ["own", "of 1", "of 2"], ["of 0", "own", "of 2"], ["of 0", "of 1", "own"]]


def exchange_with_a_dying_one(rank: int, world_size: int) -> tuple[str, int]:
    """What a rank says, and how many descriptors of the ranks' files it has kept, with its own."""
    if rank == world_size - 1:
        node_files._serve = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    own = os.memfd_create("own")
    with pytest.raises(RuntimeError) as caught:
        exchanged(own, range(world_size), rank, dist.group.WORLD)
    assert is_peer_loss(caught.value)
    files = [f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd")]
    return str(caught.value), sum("memfd:own" in os.readlink(file) for file in files if os.path.lexists(file))


def test_a_peer_that_dies_meanwhile_is_a_lost_peer() -> None:
    assert run_processes(in_world, 3, 3, exchange_with_a_dying_one, mortal=(2,))[0] == (
        "connection closed by peer: a rank of the node has shared no memory", 1)


def test_ranks_that_do_not_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nobodys = torch.tensor(list(b"nobody listens here".ljust(64)), dtype=torch.uint8)
    monkeypatch.setattr(node_files, "of_all", lambda tensor, group: [tensor, nobodys])
    with pytest.raises(NodeMemoryError) as caught:
        exchanged(0, [4, 7], 0, None)
    assert str(caught.value) == (
        "train.sharding=node: rank 4 does not reach rank 7, which may run in another container: Connection refused; "
        "allowed here: train.sharding=whole")


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_files, "of_all", lambda tensor, group: [tensor, tensor])  # it is both ranks
    monkeypatch.setattr(node_files, "_user", lambda connection: os.getuid() + 1)
    with pytest.raises(NodeMemoryError, match=r"rank 7 runs as another user than rank 4; allowed here: .*=whole$"):
        exchanged(0, [4, 7], 0, None)
