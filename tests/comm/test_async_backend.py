"""The emulated backend computes what gloo computes, in every operation that torch has for it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dhp_ray.compatibility import all_gather_single, reduce_scatter_single
from tests.async_backend import BACKEND
from tests.async_backend.rules import EMULATED, STAGED, Backend, run_group

BACKENDS = [pytest.param(EMULATED, id="emulated"), pytest.param(STAGED, id="staged", marks=pytest.mark.gpu)]


def every_operation(rank: int, device: torch.device) -> dict[str, list[float]]:
    """Results by operation; the k-th element of rank r's tensor is 10 r + k."""
    size = dist.get_world_size()

    def mine(length: int = 1) -> Tensor:
        return torch.arange(length, device=device) + 10.0 * rank

    def empty(length: int = 1) -> Tensor:
        return torch.empty(length, device=device)

    found: dict[str, Tensor | list[Tensor]] = {}
    found["all_reduce"] = total = mine()
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    found["broadcast"] = copied = mine()
    dist.broadcast(copied, 1)
    reduced = mine()
    dist.reduce(reduced, 0)
    found["reduce"] = reduced if rank == 0 else []
    found["all_gather"] = parts = [empty() for _ in range(size)]
    dist.all_gather(parts, mine())
    found["all_gather_single"] = whole = empty(size)
    all_gather_single(whole, mine())
    found["reduce_scatter"] = own = empty()
    dist.reduce_scatter(own, list(mine(size).split(1)))
    found["reduce_scatter_single"] = single = empty()
    reduce_scatter_single(single, mine(size))
    found["all_to_all_single"] = uneven = empty(sum(range(size)))
    dist.all_to_all_single(uneven, mine(size * rank), list(range(size)), [rank] * size)
    found["gather"] = gathered = [empty() for _ in range(size)] if rank == 2 else []
    dist.gather(mine(), gathered or None, dst=2)
    found["scatter"] = scattered = empty()
    dist.scatter(scattered, list(mine(size).split(1)) if rank == 1 else None, src=1)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]
    dist.barrier()
    return {name: torch.cat([value] if isinstance(value, Tensor) else value or [empty(0)]).tolist()
            for name, value in found.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation_gives_what_gloo_gives(backend: Backend) -> None:
    expected = run_group(every_operation, Backend("gloo", "cpu"), 3)
    assert run_group(every_operation, backend, 3) == expected
    assert expected[0]["reduce_scatter_single"] == [30.0]
    assert expected[2]["gather"] == [0.0, 10.0, 20.0]


def exchanged_lists(rank: int, device: torch.device) -> list[float]:
    received = [torch.empty(1, device=device) for _ in range(dist.get_world_size())]
    dist.all_to_all(received, [torch.tensor([10.0 * rank + other], device=device) for other in range(len(received))])
    return torch.cat(received).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_are_exchanged_where_gloo_does(backend: Backend) -> None:
    try:
        run_group(exchanged_lists, Backend("gloo", "cpu"), 3)
    except AssertionError as error:
        if "does not support alltoall" in str(error):  # torch 2.11
            pytest.skip("gloo of this torch exchanges single tensors alone")
        raise
    assert run_group(exchanged_lists, backend, 3) == [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0], [2.0, 12.0, 22.0]]


def sharded_gradients(rank: int, device: torch.device) -> list[list[float]]:
    """Of a network sharded by FSDP2, whole, after two passes with gradients that add up."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)).to(device)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    for unit in (network[0], network[2], network):
        fully_shard(unit, mesh=mesh)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    for step in range(2):
        network(torch.full((2, 6), rank + step + 1.0, device=device)).sum().backward()
    return [parameter.grad.full_tensor().flatten().tolist() for parameter in network.parameters()]


def test_fsdp_runs_on_it() -> None:
    """On the CPU alone: on CUDA torch 2.11 ends with a segmentation fault where a group is a Python object."""
    expected = run_group(sharded_gradients, Backend("gloo", "cpu"), 3)[0]
    for gradients in run_group(sharded_gradients, EMULATED, 3):
        for found, wanted in zip(gradients, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def changed_before_it_runs(rank: int, device: torch.device) -> float:
    """Rank 0 changes what it broadcasts after the call, while an operation before it waits for rank 1."""
    time.sleep(0.5 * rank)
    blocking, tensor = torch.ones(1), torch.ones(1)
    pending = [dist.all_reduce(blocking, async_op=True), dist.broadcast(tensor, 0, async_op=True)]
    if rank == 0:
        tensor.fill_(5.0)
    for work in pending:
        work.wait()
    return tensor.item()


def test_inputs_are_read_when_the_operation_runs() -> None:
    """What is changed between the call and `wait` shows, as it may on a device."""
    assert run_group(changed_before_it_runs, EMULATED) == [5.0, 5.0]


def make_and_destroy(rank: int, device: torch.device) -> list[int]:
    """Open files and threads after each of some groups."""
    counts = []
    for _ in range(6):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        dist.barrier()
        counts.append(len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task")))
    return counts


def test_a_destroyed_group_gives_back_sockets_and_threads() -> None:
    for counts in run_group(make_and_destroy, EMULATED):
        assert max(counts[3:]) <= max(counts[:2]) + 2, counts


def unsupported(rank: int, device: torch.device) -> list[str]:
    said = []
    for call in (lambda: dist.recv(torch.ones(1)), lambda: dist.all_reduce_coalesced([torch.ones(1)])):
        with pytest.raises(RuntimeError) as refused:
            call()
        said.append(str(refused.value))
    return said


def test_what_devices_lack_is_refused() -> None:
    assert all("does not support" in message for message in run_group(unsupported, EMULATED)[0])


def named(rank: int, device: torch.device) -> str:
    return dist.get_backend()


def test_torch_knows_it_by_name() -> None:
    assert run_group(named, EMULATED) == [BACKEND, BACKEND]


@pytest.mark.slow
def test_the_table_says_what_holds_and_what_was_not_run() -> None:
    program = "from tests.async_backend.rules import table; print(table('contiguous'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    row = done.stdout.strip().splitlines()[-1]
    assert row.startswith("| Tensors must be contiguous. | ProcessGroupNCCL, check_gpu_single_tensor | holds | ")
    if not torch.cuda.is_available():
        absent = "not run: no CUDA device on this machine"
        assert row.endswith(f"| holds | {absent} | {absent} |")
