"""A node's memory on the CPU: in-memory files that all of its ranks map.

    rank 0 (pid 40)    part 0: memfd      part 1: /proc/41/fd/N
    rank 1 (pid 41)    part 0: /proc/40/fd/N      part 1: memfd

A part has no name in a file system, does not count towards /dev/shm's limit, and is freed by the kernel with the last
process that maps it. A rank that writes to a place of a part that others write to as well holds the lock of that place,
an fcntl byte-range lock on the part's file: the kernel releases it when its holder dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.node_memory import NodeMemory, NodeMemoryError, check_all, of_all

PAGE = mmap.PAGESIZE


class HostNodeMemory(NodeMemory):
    """See `share_memory` for how it is made."""

    def __init__(self, num_bytes: int, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> None:
        self.ranks, self.own = tuple(ranks), tuple(ranks).index(rank)
        length = -(-max(1, num_bytes) // PAGE) * PAGE
        self._files = [-1] * len(self.ranks)
        self.parts: list[Tensor] = []
        try:
            self._files[self.own] = own = _created(length)
            found = os.fstat(own)
            described = torch.tensor([os.getpid(), own, found.st_dev, found.st_ino], dtype=torch.int64)
            refusal = ""
            for member, (pid, file, *identity) in enumerate(tensor.tolist() for tensor in of_all(described, group)):
                if member != self.own:
                    self._files[member], said = _opened(self.ranks[member], pid, file, identity)
                    refusal = refusal or said
            check_all(refusal, group)
            self.parts = [torch.frombuffer(_mapped(file, length), dtype=torch.uint8)[:num_bytes]
                          for file in self._files]
        except BaseException:
            self.close()
            raise

    @contextmanager
    def locked(self, member: int, lock: int) -> Iterator[None]:
        """It excludes other processes, not threads of one process."""
        file = self._files[member]
        fcntl.lockf(file, fcntl.LOCK_EX, 1, lock)
        try:
            yield
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, lock)

    def add(self, sums: Tensor, values: Tensor) -> None:
        sums.add_(values)

    def add_rows(self, sums: Tensor, rows: Tensor, values: Tensor) -> None:
        here = ((rows >= 0) & (rows < len(sums)))[:, None]
        sums.index_add_(0, rows.clamp(0, len(sums) - 1), torch.where(here, values, 0).float())

    def close(self) -> None:
        """Closing a file releases all of this process's locks on it. Memory is freed once no tensor of it is left."""
        self.parts = []
        for file in self._files:
            if file >= 0:
                with suppress(OSError):
                    os.close(file)
        self._files = []


def _created(length: int) -> int:
    """Create an in-memory file of `length` bytes."""
    if not hasattr(os, "memfd_create"):
        raise NodeMemoryError("train.sharding=node: only Linux has files in memory; allowed here: whole")
    file = os.memfd_create("dhp_ray", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, length)
    except OSError as error:
        os.close(file)
        raise _no_room(length, error) from None
    return file


def _mapped(file: int, length: int) -> mmap.mmap:
    try:
        return mmap.mmap(file, length)
    except OSError as error:
        raise _no_room(length, error) from None


def _no_room(length: int, error: OSError) -> NodeMemoryError:
    return NodeMemoryError(f"train.sharding=node: {length:,} bytes of shared memory cannot be had: {error.strerror}; "
                           "use more nodes, or a smaller model")


def _opened(rank: int, pid: int, file: int, identity: list[int]) -> tuple[int, str]:
    """Open another process's file; returns -1 and the reason if this process sees no such process, or may not look into
    it. `identity`: the file's device and inode there.
    """
    path = f"/proc/{pid}/fd/{file}"
    try:
        found = os.stat(path)
        if [found.st_dev, found.st_ino] != identity:  # processes of another container have other numbers
            return -1, f"{path} is not the memory of rank {rank}, which runs in another container"
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), ""
    except OSError as error:
        return -1, f"the memory of rank {rank} cannot be opened at {path}: {error.strerror}"
