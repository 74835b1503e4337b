"""What CUDA's and the NPU's collectives do and gloo does not: each rule with its source, on the emulation and on NCCL.

Sources: `torch.distributed` is that page of torch's documentation, ProcessGroupNCCL torch's file of that name (2.13),
ProcessGroupHCCL torch_npu's (2.13), NCCL its user guide, CANN its reference of collectives for Atlas A2.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.async_backend import work
from tests.async_backend.blocked import ENDS_S, SILENT_S, Blocked, store
from tests.async_backend.rules import Backend, rule, run_group


def sum_of_ones(device: torch.device) -> float:
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return total.item()


def late_peer(rank: int, device: torch.device) -> tuple[float, float, float]:
    """Seconds that an operation's call and its read took, where rank 1 comes 2 s late; and what was read."""
    total = torch.ones(1, device=device)
    if rank == 1:
        time.sleep(2.0)
    begin = time.monotonic()
    pending = dist.all_reduce(total, async_op=True)
    called = time.monotonic()
    pending.wait()
    value = total.item()
    return called - begin, time.monotonic() - called, value


@rule("An operation returns at once; what blocks is the read of its result.",
      "torch.distributed, Synchronous and asynchronous collective operations")
def test_operations_return_at_once(backend: Backend) -> None:
    (call_s, read_s, value), _ = run_group(late_peer, backend)
    assert call_s < 0.5
    assert read_s > 1.0
    assert value == 2.0


def lost_peer(rank: int, device: torch.device, deed: signal.Signals) -> tuple[bool, Any]:
    """Whether rank 0's read ends, and how, after rank 1 was killed or stopped."""
    if rank == 1:
        store().set("pid", str(os.getpid()))
        os.kill(os.getpid(), deed)
        return False, None
    pid = int(store().get("pid"))
    time.sleep(0.5)
    read = Blocked(lambda: sum_of_ones(device), device)
    ended = read.ends_within(SILENT_S)
    if deed == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    return ended, read.result


def killed_peer(rank: int, device: torch.device) -> tuple[bool, Any]:
    return lost_peer(rank, device, signal.SIGKILL)


def stopped_peer(rank: int, device: torch.device) -> tuple[bool, Any]:
    return lost_peer(rank, device, signal.SIGSTOP)


@rule("A peer's death raises nothing: who waits for it stays blocked.",
      "NCCL, Creating a Communicator, Asynchronous errors and error handling: the host must abort what waits")
def test_a_dead_peer_is_silent(backend: Backend) -> None:
    assert run_group(killed_peer, backend, mortal=[1])[0] == (False, None)


@rule("A peer that stands still raises nothing.", "as a dead one: nothing but the watchdog's timeout tells them apart")
def test_a_stopped_peer_is_silent(backend: Backend) -> None:
    assert run_group(stopped_peer, backend)[0] == (False, None)


def aborted(rank: int, device: torch.device) -> tuple[bool, float, str]:
    """Rank 1 never joins. Whether rank 0's read had ended before the abort; what it gave; what the next call said."""
    if rank == 1:
        store().wait(["seen"])
        return False, 0.0, ""
    read = Blocked(lambda: sum_of_ones(device), device)
    before = read.ends_within(1.0)
    dist.group.WORLD.abort()  # type: ignore[union-attr]
    assert read.ends_within(ENDS_S)
    store().set("seen", "1")
    try:
        dist.all_reduce(torch.ones(1, device=device))
    except RuntimeError as error:
        return before, read.result, str(error)
    return before, read.result, ""


@rule("An abort from another thread ends the wait: no error, and a result that is none.",
      "ProcessGroupNCCL, abort and abortComms; WorkNCCL::wait blocks only the stream")
def test_an_abort_ends_the_wait_with_garbage(backend: Backend) -> None:
    before, value, _ = run_group(aborted, backend)[0]
    assert not before
    assert isinstance(value, float)
    assert value != 2.0


@rule("After an abort the next operation on the group raises.",
      "NCCLUtils, NCCLComm::getNcclComm: \"NCCL communicator was aborted on rank\"")
def test_the_operation_after_an_abort_raises(backend: Backend) -> None:
    assert "aborted" in run_group(aborted, backend)[0][2]


def two_queued(rank: int, device: torch.device, timeout_s: float, late_s: float, watched_s: float) -> bool:
    """Rank 0 enqueues two operations; rank 1 joins the first `late_s` later, the second never. Whether rank 0's process
    is there `watched_s` after it enqueued them.
    """
    group = dist.new_group([0, 1], timeout=timedelta(seconds=timeout_s))
    tensors = [torch.ones(1, device=device) for _ in range(3)]
    dist.all_reduce(tensors[0], group=group)
    tensors[0].item()
    if rank == 0:
        for tensor in tensors[1:]:
            dist.all_reduce(tensor, group=group, async_op=True)
        store().set("pid", str(os.getpid()))
        store().wait(["seen"])
        return True
    pid = int(store().get("pid"))
    time.sleep(late_s)
    dist.all_reduce(tensors[1], group=group)
    time.sleep(watched_s - late_s)
    alive = is_running(pid)
    store().set("seen", "1")
    return alive


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def queued_behind_a_late_one(rank: int, device: torch.device) -> bool:
    return two_queued(rank, device, timeout_s=4.0, late_s=3.0, watched_s=5.8)


@rule("The watchdog ends the process at the group's timeout, counted from the call, not from the operation's start.",
      "ProcessGroupNCCL and ProcessGroupHCCL, checkTimeout: now - workStartTime_, set when the work is made")
def test_the_watchdog_counts_from_the_call(backend: Backend) -> None:
    assert run_group(queued_behind_a_late_one, backend, mortal=[0], error_handling="3") == [None, False]


def queued_without_end(rank: int, device: torch.device) -> bool:
    return two_queued(rank, device, timeout_s=1.5, late_s=0.5, watched_s=3.5)


@rule("With TORCH_NCCL_ASYNC_ERROR_HANDLING=0 (TORCH_HCCL_...) the watchdog leaves the process alone.",
      "torch, PYTORCH ProcessGroupNCCL Environment Variables; torch_npu, TORCH_HCCL_ASYNC_ERROR_HANDLING")
def test_without_error_handling_the_process_stays(backend: Backend) -> None:
    assert run_group(queued_without_end, backend, error_handling="0") == [True, True]


def sums_of_types(rank: int, device: torch.device) -> dict[str, str]:
    """What an all-reduce in each type says; empty: it is right."""
    said = {}
    for name in ("int8", "int16", "int32", "int64", "float16", "float32", "bfloat16", "float64", "uint8", "bool"):
        total = torch.ones(2, dtype=getattr(torch, name), device=device)
        try:
            dist.all_reduce(total)
            said[name] = "" if total.tolist() == [2, 2] else f"wrong: {total.tolist()}"
        except RuntimeError as error:
            said[name] = str(error)
    return said


@rule("Reductions take int8 to int64, fp16, fp32 and bf16; float64 is refused by the call.",
      "CANN, HcclAllReduce, HcclReduceScatter (dataType); ProcessGroupHCCL, checkSupportedDataTypeOfAllReduce",
      hccl_alone="a rule of HCCL; NCCL reduces float64, and not int16")
def test_types_that_hccl_cannot_sum_are_refused(backend: Backend) -> None:
    for said in run_group(sums_of_types, backend):
        refused = {name for name, message in said.items() if message}
        assert refused == {"float64", "uint8", "bool"}
        assert all("Unsupported data type" in said[name] for name in refused)


def strided(rank: int, device: torch.device) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (what it says is returned)
        dist.all_reduce(torch.ones(4, 2, device=device).t())
    return str(refused.value)


@rule("Tensors must be contiguous.", "ProcessGroupNCCL, check_gpu_single_tensor")
def test_tensors_that_are_not_contiguous_are_refused(backend: Backend) -> None:
    assert all("contiguous" in said for said in run_group(strided, backend))


def ended_amid(rank: int, device: torch.device, end: Callable[[], None]) -> bool:
    """Rank 1 never joins an operation. Whether `end` ends on rank 0."""
    rendezvous = store()
    if rank == 1:
        rendezvous.wait(["seen"])
        return False
    dist.all_reduce(torch.ones(1, device=device), async_op=True)
    ended = Blocked(end, device).ends_within(SILENT_S)
    rendezvous.set("seen", "1")
    return ended


def destroyed_amid(rank: int, device: torch.device) -> bool:
    return ended_amid(rank, device, dist.destroy_process_group)


def aborted_amid(rank: int, device: torch.device) -> bool:
    return ended_amid(rank, device, dist.distributed_c10d._abort_process_group)


@rule("Destroying a group waits for its operations, also for those that never end.",
      "ProcessGroupNCCL: shutdown() will wait for all NCCL kernels to finish")
def test_destroying_waits_for_what_is_under_way(backend: Backend) -> None:
    assert not run_group(destroyed_amid, backend)[0]


@rule("Aborting all groups instead does not wait for them.", "ProcessGroupNCCL: abort() terminates kernels")
def test_aborting_does_not_wait_for_what_is_under_way(backend: Backend) -> None:
    assert run_group(aborted_amid, backend)[0]


def test_the_emulation_gives_plausible_numbers_after_an_abort() -> None:
    """What an abort leaves must not give itself away, as NaN would."""
    byte = torch.full((8,), work.GARBAGE, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert 0.5 < byte.view(dtype)[0].item() < 2.0
