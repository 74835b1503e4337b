"""Gives freed memory back to the system."""

from __future__ import annotations

import ctypes


def give_back_memory() -> None:
    """Return freed memory to the system: glibc keeps it for its thread, and each generation has its own threads."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
