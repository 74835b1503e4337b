"""GPU memory that ranks of a node share."""

from __future__ import annotations

import gc
import os
import signal
import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.node_memory import NodeMemory, NodeMemoryError, share_memory
from tests.comm.test_node_files import in_world
from tests.ranks import run_processes, run_ranks

GPU = torch.device("cuda", 0)
ONCE = pytest.mark.gloo("ranks meet over the CPU alone")


@pytest.mark.skipif(find_spec("cuda") is not None, reason="cuda-bindings is installed")
def test_a_missing_package_is_one_line() -> None:
    with pytest.raises(NodeMemoryError) as caught:
        share_memory(GPU, 64, [3], 3, None)
    assert str(caught.value) == ("train.sharding=node: rank 3 lacks a package of torch's CUDA wheels: No module named "
                                 "'cuda'; allowed here: train.sharding=whole")


def test_devices_that_share_no_memory_and_ranks_without_a_group_are_errors() -> None:
    with pytest.raises(ValueError, match="got device 'npu'; allowed: cpu, cuda"):
        share_memory(SimpleNamespace(type="npu"), 64, [0], 0, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got no group for 2 ranks"):
        share_memory(GPU, 64, [0, 1], 0, None)


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


def on_own_device(rank: int, port: int, world_size: int) -> Any:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # as Ray sets it
    return in_world(rank, port, world_size, add_at_the_same_time)


@pytest.mark.gpu
@ONCE
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_no_add_is_lost_between_devices() -> None:
    found = run_processes(on_own_device, 2, 2)
    assert found[0] == found[1] == [[50 * 2 * 0.25 * 3] * 3 + [2 * 50 * 2 * value for value in (0.0, 5.0, 3.0)]] * 2


@pytest.mark.gpu
@ONCE
def test_a_part_outlives_its_owner_on_a_device() -> None:
    assert run_processes(in_world, 2, 2, outlive_the_owner, mortal=(1,))[0] == ([11.0], True)


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
    with pytest.raises(NodeMemoryError, match=r"^train.sharding=node: rank 0 has no room for [\d,]+ bytes; "):
        share_memory(GPU, 1 << 46, [0], 0, None)
    most = torch.empty(int(0.9 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device=GPU)
    del most  # torch keeps it
    share_memory(GPU, int(0.5 * torch.cuda.mem_get_info(GPU)[1]), [0], 0, None).close()
