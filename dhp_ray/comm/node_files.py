"""Hands file descriptors from every process of a node to every other one, over abstract Unix sockets: processes of one
network namespace reach them, and only those of the same user are served.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from dhp_ray.comm.node_memory import check_all, of_all

MEET_S = 10.0
"""The longest that a rank waits for another one's descriptor once all have connected: a rank that is silent for longer
counts as lost.
"""


@contextmanager
def closing(files: Sequence[int]) -> Iterator[None]:
    """Close the descriptors afterwards; -1 is none."""
    try:
        yield
    finally:
        for file in files:
            if file >= 0:
                os.close(file)


def exchanged(file: int, ranks: Sequence[int], own: int, group: dist.ProcessGroup | None) -> list[int]:
    """Return a descriptor of the file of every one of `ranks`, by place; -1 for this rank's own, at place `own`. All of
    them call this, with their group over the CPU. The caller closes what it gets.

    Each rank listens, tells the others where, connects to all of them, serves those that have connected to it and then
    takes what it was served: no rank waits for one that waits for it.

    Raises:
        NodeMemoryError: a rank does not reach another one, or runs as another user; on all ranks.
        RuntimeError: a rank has died meanwhile.
    """
    files, refusal = [-1] * len(ranks), ""
    name = f"dhp_ray-{os.getpid()}-{os.urandom(8).hex()}"
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket(socket.AF_UNIX))
        listener.settimeout(MEET_S)
        listener.bind(f"\0{name}")  # in no file system; gone with the socket
        listener.listen(len(ranks))
        told = torch.tensor(list(name.encode().ljust(64)), dtype=torch.uint8)
        names = [bytes(tensor.tolist()).decode().strip() for tensor in of_all(told, group)]
        others = [member for member in range(len(ranks)) if member != own]
        connections = [sockets.enter_context(socket.socket(socket.AF_UNIX)) for _ in others]
        for member, connection in zip(others, connections):
            connection.settimeout(MEET_S)
            try:
                connection.connect(f"\0{names[member]}")
                if _user(connection) != os.getuid():
                    refusal = f"rank {ranks[member]} runs as another user than rank {ranks[own]}"
            except OSError as error:
                refusal = (f"rank {ranks[own]} does not reach rank {ranks[member]}, which may run in another "
                           f"container: {error.strerror or error}")
        check_all(refusal, group)
        try:
            _serve(listener, file, len(others))
            for member, connection in zip(others, connections):
                _, [files[member]], *_ = socket.recv_fds(connection, 1, 1)
        except (OSError, ValueError) as error:  # ValueError: a peer that died has sent none
            with closing(files):
                how = "timed out" if isinstance(error, TimeoutError) else "connection closed by peer"
                raise RuntimeError(f"{how}: a rank of the node has shared no memory") from None
    return files


def _serve(listener: socket.socket, file: int, count: int) -> None:
    """Hand a descriptor to `count` processes of this user, all of which have connected."""
    while count:
        connection, _ = listener.accept()
        with connection:
            if _user(connection) == os.getuid():
                socket.send_fds(connection, [b"\n"], [file])
                count -= 1


def _user(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
