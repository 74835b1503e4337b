"""Ends this process when an operation of a group is not over in time, as torch's watchdogs do."""

from __future__ import annotations

import os
import signal
import sys
import time
from threading import Lock, Thread
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from tests.async_backend.group import AsyncGroup

POLL_S = 0.1
"""ProcessGroupNCCL.hpp, kWatchdogThreadSleepMillis."""
HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_HCCL_ASYNC_ERROR_HANDLING")
"""A worker sets both to 0 to keep its process; here one that is forgotten shows."""

_groups: WeakSet[AsyncGroup] = WeakSet()
_lock = Lock()
_thread: Thread | None = None


def watch(group: AsyncGroup) -> None:
    """From now on; not where both variables of HANDLING are 0 now."""
    global _thread
    if all(os.environ.get(name) == "0" for name in HANDLING):
        return
    with _lock:
        _groups.add(group)
        if _thread is None:
            _thread = Thread(target=_run, name="watchdog", daemon=True)
            _thread.start()


def _run() -> None:
    while True:
        time.sleep(POLL_S)
        with _lock:
            groups = list(_groups)
        for group in groups:
            late = group.oldest()
            if late is not None and time.monotonic() - late.enqueued_s > group.timeout.total_seconds():
                print(f"Watchdog caught collective operation timeout: {late.name} of {group.name()} ran for "
                      f"{time.monotonic() - late.enqueued_s:.1f} s", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGABRT)
        groups, group = [], None  # it must not keep a group that is destroyed
