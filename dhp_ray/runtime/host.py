"""What the threads of a run ask of the system that they run on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

PRIORITY = -10
"""The nice value of a thread that trains or plans, and of those that it starts: about nine times the processor time of others that want the same core."""


def take_precedence() -> None:
    """Run this thread before others where cores are short: on a full node Ray's own processes would hold up one rank, and that one all the others.

    Lower nice values are a privilege on Linux (root, CAP_SYS_NICE or RLIMIT_NICE); without it the thread stays as it is.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRIORITY)


def give_back_memory() -> None:
    """Let the system have what has been freed: glibc keeps it for the thread that had it, and each generation has threads of its own."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
