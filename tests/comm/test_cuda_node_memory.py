"""GPU memory that ranks of a node share; how they come by it needs no GPU."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm import cuda_node_memory
from dhp_ray.comm.cuda_node_memory import _exchanged
from dhp_ray.comm.node_memory import NodeMemory, NodeMemoryError, share_memory
from tests.ranks import run_processes, run_ranks

GPU = torch.device("cuda", 0)
ONCE = pytest.mark.gloo("ranks meet over the CPU alone")


def exchange_files(rank: int, world_size: int) -> list[str]:
    own = os.memfd_create("own")
    os.write(own, f"of {rank}".encode())
    before = len(os.listdir("/proc/self/fd"))
    files = _exchanged(own, range(10, 10 + world_size), rank, dist.group.WORLD)
    texts = ["own" if file < 0 else os.pread(file, 100, 0).decode() for file in files]
    for file in set(files) - {-1}:
        os.close(file)
    assert len(os.listdir("/proc/self/fd")) == before
    return texts


def test_every_rank_gets_a_descriptor_of_every_other() -> None:
    assert run_ranks(exchange_files, 3, 3) == [
        ["own", "of 1", "of 2"], ["of 0", "own", "of 2"], ["of 0", "of 1", "own"]]


def exchange_with_a_silent_one(rank: int, world_size: int) -> str:
    if rank == 1:
        cuda_node_memory._serve = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        _exchanged(os.memfd_create("own"), range(world_size), rank, dist.group.WORLD)
    return str(caught.value)


def test_a_peer_that_dies_meanwhile_is_a_lost_peer() -> None:
    assert run_processes(_in_world, 2, 2, exchange_with_a_silent_one, mortal=(1,))[0] == (
        "connection closed by peer: rank 1 shared no memory")


def test_ranks_that_do_not_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nobodys = torch.tensor(list(b"nobody listens here".ljust(64)), dtype=torch.uint8)
    monkeypatch.setattr(cuda_node_memory, "of_all", lambda tensor, group: [tensor, nobodys])
    with pytest.raises(NodeMemoryError) as caught:
        _exchanged(0, [4, 7], 0, None)
    assert str(caught.value) == (
        "train.sharding=node: rank 4 does not reach rank 7, which may run in another container: Connection refused; "
        "allowed here: train.sharding=whole")


@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed")
def test_a_missing_package_is_one_line() -> None:
    with pytest.raises(NodeMemoryError) as caught:
        share_memory(GPU, 64, [3], 3, None)
    assert str(caught.value) == ("train.sharding=node: rank 3 lacks the package triton; "
                                 "allowed here: train.sharding=whole")


def _in_world(rank: int, port: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return function(rank, world_size, *arguments)


def views(memory: NodeMemory) -> list[torch.Tensor]:
    return [part.view(torch.float32) for part in memory.parts]


def add_at_the_same_time(rank: int, world_size: int) -> list[list[float]]:
    """Every rank adds to every part 50 times; wholes and rows, in both types."""
    memory = share_memory(GPU, 4 * 6000, range(world_size), rank, dist.group.WORLD)
    parts = views(memory)
    assert all(not part.any() for part in parts)
    torch.cuda.synchronize()
    dist.barrier()
    wide = torch.full((3000,), 0.25 * (rank + 1), device=GPU)
    rows = torch.tensor([0, 2, 2, -1, 3, 1], device=GPU)
    values = torch.arange(6.0, device=GPU)[:, None].expand(6, 1000).contiguous()
    for _ in range(50):
        for part in parts:
            with memory.locked(0, 0):
                memory.add(part[:3000], wide)
                memory.add(part[:3000], wide.bfloat16())
                memory.add_rows(part[3000:].view(3, 1000), rows, values)
                memory.add_rows(part[3000:].view(3, 1000), rows, values.bfloat16())
    torch.cuda.synchronize()
    dist.barrier()
    found = [part.view(6, 1000).unique(dim=1) for part in parts]
    dist.barrier()
    del parts
    memory.close()
    assert all(one.shape == (6, 1) for one in found), "places differ"
    return [one.flatten().tolist() for one in found]


@pytest.mark.gpu
@ONCE
def test_no_add_is_lost_on_a_device() -> None:
    wholes = 50 * 2 * 0.25 * (1 + 2 + 3)
    expected = [[wholes] * 3 + [3 * 50 * 2 * value for value in (0.0, 5.0, 1.0 + 2.0)]] * 3
    assert run_ranks(add_at_the_same_time, 3, 3) == [expected] * 3


def outlive_the_owner(rank: int, world_size: int) -> tuple[list[float], bool]:
    """What is in a dead rank's part, and whether its memory is free once no other rank maps it."""
    size = 512 * 2**20
    torch.zeros(1, device=GPU)
    memory = share_memory(GPU, size, range(world_size), rank, dist.group.WORLD)
    views(memory)[rank].fill_(10.0 * rank)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2.0)
    of_dead = views(memory)[1]
    memory.add(of_dead, torch.ones_like(of_dead))
    seen = of_dead.unique().tolist()
    del of_dead
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    memory.close()
    return seen, torch.cuda.mem_get_info()[0] - free >= 2 * size


@pytest.mark.gpu
@ONCE
def test_a_part_outlives_its_owner_on_a_device() -> None:
    assert run_processes(_in_world, 2, 2, outlive_the_owner, mortal=(1,))[0] == ([11.0], True)


@pytest.mark.gpu
@ONCE
def test_nothing_is_left_on_a_device() -> None:
    def free() -> int:
        gc.collect()
        return torch.cuda.mem_get_info()[0]

    share_memory(GPU, 64, [0], 0, None).close()  # what happens once does not count
    files, before = len(os.listdir("/proc/self/fd")), free()
    for _ in range(100):
        memory = share_memory(GPU, 2**30, [5], 5, None)
        memory.parts[0].fill_(1)
        memory.close()
    assert len(os.listdir("/proc/self/fd")) == files
    assert before - free() < 10 * 2**30, "others may use the device, but one in ten would be left"
    with pytest.raises(NodeMemoryError, match=r"^train.sharding=node: [\d,]+ bytes of GPU memory cannot be had: CUDA_"):
        share_memory(GPU, 1 << 46, [0], 0, None)
