"""What recovery on a device rests on: a control thread gets on while the training thread is blocked, and ends its wait.

    busy     the device computes for seconds; the training thread is in `.item()`, the control thread answers
    peer     rank 1 never joins an operation, or is killed: the control thread ends rank 0's wait by `abort_groups`
    joining  rank 1 never comes when a NCCL communicator is made: no abort ends that wait. If communicators are made
             without blocking, torch's own limit does
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.device_parts.record import CheckError, Record
from benchmarks.device_parts.settings import Settings
from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.comm.progress import AbortedError, Progress
from dhp_ray.comm.world import abort_groups
from tests import async_backend
from tests.async_backend.blocked import Blocked, store
from tests.async_backend.shared_gpu import share_gpu
from tests.ranks import run_processes

HEAD = ["what", "blocked s", "median answer ms", "longest", "ended by the abort after ms", "training thread raised",
        "next operation"]
ANSWERS_S = 0.1
"""Within this long a control thread must answer."""
ENDS_S = 2.0
"""Within this long an abort must have ended a wait."""
BUSY_S = 2.0
WATCHED_S = 1.5
"""How long a wait is watched before it is ended."""
POLL_S = 0.02
PER_SLEEP = 10**9
"""Cycles of one `torch.cuda._sleep`."""
MAKING_S = 4
"""What torch is told to wait at most while NCCL makes a communicator."""


class Answers(NamedTuple):
    """Where a rank is, asked every POLL_S for `blocked_s`: the median and the longest time that an answer was late, and
    the last answer. Nobody waits longer for an answer on a device. A CPU that others use delays some of them by itself.
    """

    blocked_s: float
    median_s: float
    longest_s: float
    doing: str

    def late_s(self, device: str) -> float:
        return self.median_s if device == "cpu" else self.longest_s

    def cells(self) -> list[str]:
        return [f"{self.blocked_s:.2f}", f"{1e3 * self.median_s:.1f}", f"{1e3 * self.longest_s:.1f}"]


class Wait(NamedTuple):
    """Of the rank whose peer is gone. `answers`: of the control thread, until `blocked_s` had passed and the wait had
    not ended; `ended_s`: from the abort; `raised`: what the training thread raised; `after`: what the group's next
    operation said.
    """

    answers: Answers
    ended_s: float
    raised: str
    after: str


def run(settings: Settings, record: Record) -> str:
    record.table(HEAD)
    wrong = []
    if settings.device == "cuda":
        wrong += busy(record)
    for deed in ("never joins", "is killed"):
        wrong += lost_peer(record, settings.device, async_backend.BACKEND, deed)
    if settings.device == "cuda":
        for nonblocking in (False, True):
            wrong += never_made(record, nonblocking)
    if wrong:
        raise CheckError("; ".join(wrong))
    found = [figures for figures in record.tree["figures"].values() if "median_s" in figures]
    return (f"median answers within {1e3 * max(figures['median_s'] for figures in found):.1f} ms, waits ended within "
            f"{1e3 * max(figures.get('ended_s', 0.0) for figures in found):.0f} ms of the abort")


def answers_of(progress: Progress, ended: Callable[[float], bool], watched_s: float) -> Answers:
    """Ask where a rank is, as the control thread does, until `ended(POLL_S)` or for `watched_s`."""
    begin, late_s, doing, over = time.monotonic(), list[float](), "", False
    while not over and time.monotonic() - begin < watched_s:
        asked = time.monotonic()
        doing = str(progress.passed())
        over = ended(POLL_S)
        late_s.append(max(0.0, time.monotonic() - asked - POLL_S))
    return Answers(time.monotonic() - begin, statistics.median(late_s), max(late_s), doing)


def busy(record: Record) -> list[str]:
    """The device computes for BUSY_S, and the training thread reads a number behind that."""
    accelerator = ACCELERATORS["cuda"]
    accelerator.activate()
    device = accelerator.torch_device()
    progress = Progress(device)
    number = torch.ones((), device=device) * 2.0  # a kernel that is loaded later waits for those that run
    progress.mark("layer 0")
    progress.synchronize()
    sleeps = 0
    for _ in range(2):  # an idle device runs slower at first
        begin = time.monotonic()
        torch.cuda._sleep(PER_SLEEP)
        progress.synchronize()
        sleeps = math.ceil(BUSY_S / (time.monotonic() - begin))
    for _ in range(sleeps):
        torch.cuda._sleep(PER_SLEEP)
    number = torch.ones((), device=device) * 2.0
    progress.mark("layer 1")
    read = Blocked(number.item, device)
    answers = answers_of(progress, read.ends_within, 4 * BUSY_S)
    record.row("busy device", {**answers._asdict(), "read": read.result},
               ["a busy device", *answers.cells(), "-", "-", "-"])
    if answers.blocked_s < BUSY_S / 2:
        return [f"a read behind {BUSY_S:g} s of computing ended after {answers.blocked_s:.2f} s"]
    late_s = answers.late_s("cuda")
    return [] if late_s < ANSWERS_S else [f"an answer beside a blocked read took {late_s:.2f} s"]


def lost_peer(record: Record, device: str, backend: str, deed: str) -> list[str]:
    wait: Wait = run_processes(alone, 2, device, backend, deed, timeout_s=40.0, mortal=[1])[0]
    return written(record, f"{backend}, peer {deed}", device, wait)


def written(record: Record, name: str, device: str, wait: Wait) -> list[str]:
    """A row; what is wrong with it."""
    answers, late_s = wait.answers, wait.answers.late_s(device)
    figures = {**answers._asdict(), "ended_s": wait.ended_s, "raised": wait.raised, "after": wait.after}
    record.row(name, figures,
               [name, *answers.cells(),
                f"{1e3 * wait.ended_s:.0f}" if wait.ended_s < ENDS_S else "not ended", wait.raised, wait.after])
    checks = {f"its wait ended by itself after {answers.blocked_s:.2f} s": answers.blocked_s >= WATCHED_S,
              f"an answer took {late_s:.2f} s": late_s < ANSWERS_S,
              f"the abort did not end its wait within {ENDS_S:g} s": wait.ended_s < ENDS_S,
              f"the training thread raised {wait.raised or 'nothing'}": wait.raised == AbortedError.__name__,
              f"the next operation said {wait.after or 'nothing'}": "abort" in wait.after}
    return [f"{name}: {what}" for what, right in checks.items() if not right]


def alone(rank: int, port: int, device_name: str, backend: str, deed: str) -> Wait | None:
    """Rank 1 does the deed; rank 0 waits for it, in a thread, as training does."""
    async_backend.register()
    accelerator = replace(ACCELERATORS[device_name], backend=backend)
    if backend == "nccl":
        share_gpu(rank)  # all ranks take the first device
    accelerator.activate()
    device, timeout = accelerator.torch_device(), timedelta(seconds=60)
    found = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=found, rank=rank, world_size=2, timeout=timeout,
                            device_id=device if backend == "nccl" else None)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert total.item() == 2.0
    if rank == 1:
        if deed == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        store().wait(["seen"])
        return None
    found_wait = ended_wait(device)
    store().set("seen", "1")
    return found_wait


def ended_wait(device: torch.device) -> Wait:
    """Wait for a peer that does not answer, in a thread, as training does, and end that by an abort."""
    progress = Progress(device)
    progress.stage = "step 3"

    def wait_for_peer() -> Any:
        number = torch.ones(1, device=device)
        with progress.waiting("shards of other ranks"):
            dist.all_reduce(number)
        return progress.read(number)

    wait = Blocked(wait_for_peer, device)
    answers = answers_of(progress, wait.ends_within, WATCHED_S)
    begin = time.monotonic()
    progress.abort()
    abort_groups()
    wait.ends_within(ENDS_S)
    ended_s = time.monotonic() - begin
    raised = type(wait.result).__name__ if isinstance(wait.result, BaseException) else ""
    after = ""
    try:
        dist.all_reduce(torch.ones(1, device=device))
    except RuntimeError as error:
        after = str(error).split("\n")[0][:120]
    return Wait(answers, ended_s, raised, after)


def never_made(record: Record, nonblocking: bool) -> list[str]:
    """A NCCL communicator of two ranks, one of which never comes. What becomes of one that blocks the host, which is
    torch's default, is only written down: a run gives up the rank that waits for it.
    """
    name = f"nccl: peer never comes, {'non-blocking' if nonblocking else 'blocking'} communicator"
    try:
        ended, seconds, said = run_processes(joining, 1, nonblocking, timeout_s=30.0)[0]
    except AssertionError as error:
        ended, seconds, said = False, 0.0, str(error).strip().splitlines()[-1]
    record.row(name, {"ended": ended, "ended_s": seconds, "said": said},
               [name, f"{WATCHED_S:.2f}", "-", "-", f"{1e3 * seconds:.0f}" if ended else "not ended", said or "-", "-"])
    return [] if ended or not nonblocking else [f"{name}: its wait did not end"]


def joining(rank: int, port: int, nonblocking: bool) -> tuple[bool, float, str]:
    """Whether the wait for the peer ended, how many seconds after an abort, and what it raised."""
    os.environ.update(TORCH_NCCL_USE_COMM_NONBLOCKING="1" if nonblocking else "0",
                      TORCH_NCCL_NONBLOCKING_TIMEOUT=str(MAKING_S))
    accelerator = ACCELERATORS["cuda"]
    accelerator.activate()
    device = accelerator.torch_device()
    found = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("nccl", store=found, rank=0, world_size=2, timeout=timedelta(seconds=60))
    number = torch.ones(1, device=device)

    def join() -> Any:
        dist.all_reduce(number)
        return number.item()

    wait = Blocked(join, device)
    if wait.ends_within(WATCHED_S):
        raise RuntimeError(f"a communicator without its peer did not wait: {wait.result}")
    abort = Blocked(abort_groups, device)  # it may wait for what it is to end
    begin = time.monotonic()
    ended = wait.ends_within(MAKING_S + 5.0)
    seconds = time.monotonic() - begin
    abort.ends_within(1.0)
    return ended, seconds, str(wait.result).split("\n")[0][:120] if ended else ""
