"""Limits how much freed memory the C library keeps."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 4 * 2**20
"""The size of a block that is worth a mapping of its own: a thousand pages."""
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def give_back_memory() -> None:
    """Return freed memory to the system: glibc keeps it for its thread, and each generation has its own threads."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def map_large_blocks() -> None:
    """Let blocks of LARGE_BYTES and more return to the system as soon as they are freed, for the life of this process.

    By default glibc maps only blocks above the largest that it has seen freed (32 MB at most), and cuts the others from
    a heap: parameters that come and go with every layer, of many sizes, leave it full of holes. Filling the pages of a
    new mapping takes about as long as copying as many bytes.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
