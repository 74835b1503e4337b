"""Memory that all ranks of a node map: each owns a part, every other one reads it and adds to it by itself.

    rank 0 (pid 40)    part 0: memfd      part 1: /proc/41/fd/N
    rank 1 (pid 41)    part 0: /proc/40/fd/N      part 1: memfd

A part has no name in a file system, takes nothing of /dev/shm's limit, and is freed by the kernel with the last process
that maps it. Whoever writes to a place of a part that others write to as well holds that place's lock, a byte-range
lock of fcntl on the part's file: the kernel releases it when its holder dies.
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

from dhp_ray.comm.ranks import gather_over_ranks

PAGE = mmap.PAGESIZE


class NodeMemoryError(RuntimeError):
    """Ranks of a node cannot map one another's memory; the message is one line."""


class NodeMemory:
    """The parts of all ranks of a node, each `num_bytes` long and zero at first.

    `parts` are uint8 tensors, one a member, by its place among `ranks`.
    """

    def __init__(self, num_bytes: int, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> None:
        """Every rank of `ranks`, those of this node, calls this; `group` is theirs, over the CPU (None: one rank).

        Raises:
            NodeMemoryError: a process may not open the memory of another one.
        """
        self.ranks, self.own = tuple(ranks), tuple(ranks).index(rank)
        length = -(-max(1, num_bytes) // PAGE) * PAGE
        own = os.memfd_create("dhp_ray", os.MFD_CLOEXEC)
        self._files = [-1] * len(self.ranks)
        self.parts: list[Tensor] = []
        self._files[self.own] = own
        try:
            os.ftruncate(own, length)
            described = torch.tensor([os.getpid(), own, os.fstat(own).st_ino], dtype=torch.int64)
            everyone = [described] if group is None else gather_over_ranks(described, group)
            for member, (pid, file, inode) in enumerate(tensor.tolist() for tensor in everyone):
                if member != self.own:
                    self._files[member] = _opened(self.ranks[member], pid, file, inode)
            self.parts = [torch.frombuffer(mmap.mmap(file, length), dtype=torch.uint8)[:num_bytes]
                          for file in self._files]
        except BaseException:
            self.close()
            raise

    @contextmanager
    def locked(self, member: int, place: int) -> Iterator[None]:
        """Hold the lock of a place of a member's part against all other processes; for one thread of each.

        Places are numbers of the caller's; they need not be addresses.
        """
        file = self._files[member]
        fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
        try:
            yield
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)

    def close(self) -> None:
        """Forget all parts. Memory is freed once no tensor of it is left, in any process."""
        self.parts = []
        for file in self._files:
            if file >= 0:
                with suppress(OSError):
                    os.close(file)
        self._files = []


def _opened(rank: int, pid: int, file: int, inode: int) -> int:
    """Another process's file; refused where this process sees no such process, or may not look into it."""
    path = f"/proc/{pid}/fd/{file}"
    try:
        found = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NodeMemoryError(f"train.sharding=node: the memory of rank {rank} cannot be opened at {path}: "
                              f"{error.strerror}; allowed here: train.sharding=whole") from None
    if os.fstat(found).st_ino != inode:  # processes of another container have other numbers
        os.close(found)
        raise NodeMemoryError(f"train.sharding=node: {path} is not the memory of rank {rank}, which runs in another "
                              "container; allowed here: train.sharding=whole")
    return found
