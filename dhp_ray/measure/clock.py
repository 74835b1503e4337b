"""Measures time on a machine that other processes use too.

    lost_s       how long other processes of this machine had this thread's core
    undisturbed  keeps other processes off the cores of this process
    Gauge        tells whether a core is slower than at its best, for example because another virtual machine, which
                 is not visible here, shares it
    QuietCores   waits for cores to be at their best, as long as that helps
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from time import perf_counter, process_time, sleep, thread_time

import torch

from dhp_ray.measure.timings import AT_BEST

THREADS = Path("/proc/self/task")


def lost_s() -> float:
    """Return the seconds in which this thread was ready to run and the scheduler let others run instead, counted from
    an arbitrary moment: only differences have a meaning (`lost_since`). 0 if the system does not report them; Linux
    does, in nanoseconds, as the second number of a task's `schedstat`.

    On a single core, the compute time of the process's other threads is subtracted: they keep this thread waiting, but
    their work, such as an exchange, is the process's own. They may compute while this thread waits for something else,
    so a difference may be negative. On several cores, their compute time does not tell whether this thread waited for
    them, so nothing is subtracted.

    The time of a pack minus what it lost is what the pack takes on a machine that nobody else uses.
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
    """The part of `busy_s` during which others had the core. `lost_s` and `computed_s` (processor time of the thread)
    cover a slightly longer span: time lost at its ends, outside of `busy_s`, does not count, but all of the compute was
    inside.
    """
    return min(lost_s, max(0.0, busy_s - computed_s))


def may_preempt() -> bool:
    """Whether this process may take precedence over all others (Linux; usually only root may)."""
    try:
        with undisturbed():
            return True
    except (OSError, AttributeError):
        return False


@contextmanager
def undisturbed(wanted: bool = True) -> Iterator[None]:
    """Schedule all threads of this process in real time, so that no ordinary process gets its cores.

    Use it for about a second at a time, because other processes stand still meanwhile.

    Raises:
        PermissionError: this process may not do so.
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
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


class Gauge:
    """A fixed computation of about a millisecond that tells how fast this thread's core is at the moment. WARM of them
    are not counted: a core that has slept is up to a fifth slower at first.
    """

    SIZE, CALLS, TAKEN, WARM = 256, 4, 3, 5

    def __init__(self) -> None:
        self._matrix = torch.randn(self.SIZE, self.SIZE)
        self.best_s = min(self._seconds() for _ in range(30))

    def slowness(self) -> float:
        """How many times as long as its best time the computation takes (1: the core is at its best)."""
        for _ in range(self.WARM):
            self._seconds()
        seconds = sorted(self._seconds() for _ in range(self.TAKEN))[self.TAKEN // 2]
        self.best_s = min(self.best_s, seconds)
        return seconds / self.best_s

    def _seconds(self) -> float:
        begin = perf_counter()
        for _ in range(self.CALLS):
            torch.mm(self._matrix, self._matrix)
        return perf_counter() - begin


@cache
def gauge_of_process() -> Gauge:
    """The one gauge of this process: a later measurement on cores that are all slower then shows as slow."""
    return Gauge()


class QuietCores:
    """Waits until cores are at their best: calls `slowness()` at most `looks` times, LOOK_S seconds apart. After VAIN
    waits in a row without success it calls it once per wait, because this machine's cores may never be at their best.
    `slowness` returns the slowness of the slowest core of all ranks (`Gauge.slowness`), so all ranks wait equally long.
    """

    VAIN, LOOK_S = 30, 0.1

    def __init__(self, slowness: Callable[[], float], looks: int) -> None:
        self._slowness, self._looks, self._vain = slowness, looks, 0

    @property
    def hopeless(self) -> bool:
        """Whether it no longer waits."""
        return self._vain >= self.VAIN

    def wait(self) -> None:
        """Return once cores are at their best, or there are no looks left."""
        for left in range(1 if self.hopeless else self._looks, 0, -1):
            if self._slowness() <= AT_BEST:
                self._vain = 0
                return
            if left > 1:
                sleep(self.LOOK_S)
        self._vain += 1
