"""CUDA's node memory without a device: the driver's calls go to in-memory files (`cuda_driver.py`), adds to torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm import cuda_node_memory
from dhp_ray.comm.cuda_node_memory import CudaNodeMemory
from dhp_ray.comm.node_memory import NodeMemoryError
from dhp_ray.comm.ranks import gather_over_ranks
from tests.comm import cuda_driver
from tests.comm.test_node_files import in_world
from tests.ranks import run_processes, run_ranks

pytestmark = pytest.mark.gloo("ranks meet over the CPU alone")
HERE = torch.device("cpu")
NUM_BYTES = 4 * 300


def add(sums: Tensor, values: Tensor) -> None:
    sums.add_(values)


def add_in_turn(sums: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add rows, one rank after another: torch's adds are not atomic. One row alone compiles a kernel, beside others."""
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank():
            sums.index_add_(0, rows, values.float())
        if len(rows) > 1:
            dist.barrier()


def prepare(add_rows: Callable[[Tensor, Tensor, Tensor], None] = add_in_turn) -> Any:
    """Replace the driver and the kernels in this process. Returns the driver."""
    cuda_node_memory.TRIED_ADDS = 16
    sys.modules["dhp_ray.comm.cuda_adds"] = SimpleNamespace(add=add, add_rows=add_rows)  # type: ignore[assignment]
    return cuda_driver.install()


def left() -> tuple[int, int]:
    """Open descriptors, and mappings of parts."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:cuda")


def refused(rank: int, world_size: int, num_bytes: int = NUM_BYTES) -> str:
    """Return the error that this rank raises, and check that it leaves no descriptor or mapping open."""
    before = left()
    with pytest.raises(NodeMemoryError) as caught:
        CudaNodeMemory(HERE, num_bytes, range(world_size), rank, dist.group.WORLD)
    assert left() == before
    return str(caught.value)


def read_and_add(rank: int, world_size: int) -> list[list[float]]:
    prepare()
    before = left()
    memory = CudaNodeMemory(HERE, NUM_BYTES, range(world_size), rank, dist.group.WORLD)
    assert left() == (before[0], world_size), "no descriptor is kept"
    parts = [part.view(torch.float32) for part in memory.parts]
    assert [len(part) for part in parts] == [300] * world_size
    assert all(not part.any() for part in parts), "zero after the trial of adds"
    dist.barrier()
    parts[rank].fill_(10.0 * rank)
    dist.barrier()
    for turn in range(world_size):
        if turn == rank:
            for part in parts:
                memory.add(part[:100], torch.full((100,), 2.0**rank))
        dist.barrier()
    found = [part[::150].tolist() for part in parts]
    dist.barrier()
    del parts
    memory.close()
    assert left() == before
    return found


def test_every_rank_reads_and_adds_to_every_part() -> None:
    assert run_ranks(read_and_add, 3, 3) == [[[7.0, 0.0], [17.0, 10.0], [27.0, 20.0]]] * 3


def map_no_other(rank: int, world_size: int) -> str:
    driver = prepare()
    if rank == 1:
        allowed, calls = driver.cuMemSetAccess, iter([False])
        driver.cuMemSetAccess = lambda *arguments: (
            allowed(*arguments) if next(calls) else (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,))
    return refused(rank, world_size)


def test_a_gpu_that_does_not_reach_another_is_one_line_on_all_ranks() -> None:
    other = "train.sharding=node: a rank cannot open the memory of another; allowed here: train.sharding=whole"
    assert run_ranks(map_no_other, 3, 3) == [
        other, "train.sharding=node: rank 1 cannot map the GPU memory of rank 0: CUDA_ERROR_NOT_SUPPORTED; allowed "
               "here: train.sharding=whole", other]


def have_no_room(rank: int, world_size: int) -> str:
    prepare()
    return refused(rank, world_size, cuda_driver.LARGEST + 1 if rank == 0 else NUM_BYTES)


def test_no_room_is_one_line_on_all_ranks() -> None:
    said = run_ranks(have_no_room, 2, 2)
    assert said[0].startswith("train.sharding=node: rank 0 has no room for 1,099,511,627,777 bytes; allowed here: ")
    assert said[1].startswith("train.sharding=node: a rank cannot open the memory of another; ")


def lose_an_add(rank: int, world_size: int) -> str:
    def add_rows(sums: Tensor, rows: Tensor, values: Tensor) -> None:
        kept = len(rows) - (rank == 1 and len(rows) > 1)
        add_in_turn(sums, rows[:kept], values[:kept])

    prepare(add_rows)
    return refused(rank, world_size)


def test_adds_that_get_lost_are_one_line_on_all_ranks() -> None:
    for rank, said in enumerate(run_ranks(lose_an_add, 2, 2)):
        assert said == (f"train.sharding=node: adds of other GPUs to the memory of rank {rank} got lost: they are not "
                        "atomic (nvidia-smi topo -p2p a); allowed here: train.sharding=whole")


def fail_to_compile(rank: int, world_size: int) -> str:
    def add_rows(sums: Tensor, rows: Tensor, values: Tensor) -> None:
        if rank == 1:
            raise RuntimeError("ptxas died\nmore of it")

    prepare(add_rows)
    return refused(rank, world_size)


def test_kernels_that_do_not_compile_are_one_line_on_all_ranks() -> None:
    assert run_ranks(fail_to_compile, 2, 2) == [
        "train.sharding=node: a rank cannot open the memory of another; allowed here: train.sharding=whole",
        "train.sharding=node: rank 1 cannot compile the kernels of the adds: ptxas died; allowed here: "
        "train.sharding=whole"]


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def outlive_the_owner(rank: int, world_size: int) -> tuple[float, tuple[int, int]]:
    prepare()
    memory = CudaNodeMemory(HERE, NUM_BYTES, range(world_size), rank, dist.group.WORLD)
    memory.parts[rank].view(torch.float32).fill_(5.0 * rank)
    owner = int(gather_over_ranks(torch.tensor(os.getpid()), dist.group.WORLD)[1])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not is_dead(owner):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    of_dead = memory.parts[1].view(torch.float32)
    memory.add(of_dead, torch.ones(300))
    seen, mapped = float(of_dead.sum()), left()[1]
    del of_dead
    memory.close()
    return seen, (mapped, left()[1])


def test_a_part_outlives_its_owner() -> None:
    assert run_processes(in_world, 2, 2, outlive_the_owner, mortal=(1,))[0] == (1800.0, (2, 0))
