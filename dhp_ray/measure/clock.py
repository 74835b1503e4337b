"""Time on a machine that others use too: how much of it a thread lost to them, how to lose none, and whether cores are
as fast as they can be.

    lost_s       others of this machine had the core
    undisturbed  nobody else gets it
    Gauge        it is slower than at its best: what shares it may be another virtual machine, which nothing here sees
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter, process_time, thread_time

import torch

THREADS = Path("/proc/self/task")


def lost_s() -> float:
    """Seconds in which this thread was ready to run and the scheduler let others run in its place, counted from some
    moment on: only differences mean anything (`lost_since`). 0 where the system does not tell; Linux does, as the
    second number of a task's `schedstat`, in nanoseconds.

    On a single core what the process's other threads computed is taken off: they keep this thread waiting, but their
    work, such as an exchange, is the process's own. They may compute while this thread waits for something else, so a
    difference may be negative. On several cores their compute says nothing of this thread's waiting, and all counts.

    What a pack takes on the clock, less what it lost meanwhile, is what it takes on a machine that nobody else uses.
    """
    try:
        text = (THREADS / str(threading.get_native_id()) / "schedstat").read_text()
        own_s = process_time() - thread_time() if len(os.sched_getaffinity(0)) == 1 else 0.0
        return int(text.split()[1]) / 1e9 - own_s
    except (AttributeError, OSError, IndexError, ValueError):
        return 0.0


def lost_since(before_s: float) -> float:
    """Seconds lost since `lost_s()` returned `before_s`."""
    return max(0.0, lost_s() - before_s)


def lost_of(busy_s: float, lost_s: float, computed_s: float) -> float:
    """Those of `busy_s` that others had the core for. `lost_s` and `computed_s` (processor time of the thread) are of a
    span that is a little longer: what was lost at its ends, just outside, is no part of `busy_s`, and all of the
    computing is.
    """
    return min(lost_s, max(0.0, busy_s - computed_s))


def may_preempt() -> bool:
    """Whether this process may run before all others (Linux; as a rule root alone)."""
    try:
        with undisturbed():
            return True
    except (OSError, AttributeError):
        return False


@contextmanager
def undisturbed(wanted: bool = True) -> Iterator[None]:
    """Let no ordinary process have this one's cores meanwhile: all of its threads are scheduled in real time.

    For a second or so at a time: others stand still.

    Raises:
        PermissionError: this process may not.
    """
    if not wanted:
        yield
        return
    try:
        _schedule(os.SCHED_RR, 1)
        yield
    finally:
        with suppress(PermissionError):
            _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for thread in os.listdir(THREADS):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


class Gauge:
    """A fixed computation of a millisecond, which tells how fast this thread's core is just now."""

    SIZE, CALLS, TAKEN = 256, 4, 3

    def __init__(self) -> None:
        self._matrix = torch.randn(self.SIZE, self.SIZE)
        self.best_s = min(self._seconds() for _ in range(30))

    def slowness(self) -> float:
        """By how much it takes longer than ever before; 1: it is as fast as it can be."""
        seconds = sorted(self._seconds() for _ in range(self.TAKEN))[self.TAKEN // 2]
        self.best_s = min(self.best_s, seconds)
        return seconds / self.best_s

    def _seconds(self) -> float:
        begin = perf_counter()
        for _ in range(self.CALLS):
            torch.mm(self._matrix, self._matrix)
        return perf_counter() - begin
