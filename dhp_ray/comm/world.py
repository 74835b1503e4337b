"""One generation of the group: its torch world over a rendezvous store that outlives the ranks.

    store       one TCPStore for the whole run, in a process that is no rank; keys begin with the generation
    meeting     every rank says that it is there and waits for the others; a generation that has been called off lets go at once
    world       the default process group, and what is made from it

A rank whose peer has died sees its collectives raise. It leaves at once: closed sockets free the ranks that wait for it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from dhp_ray.comm.device import Accelerator
from dhp_ray.comm.interface import address_towards, listen_on

POLL_S = 0.01
CONNECT_TIMEOUT = timedelta(seconds=10)
"""For building communicators, while a peer that dies would be waited for; collectives have a longer one of their own."""


class MeetingError(RuntimeError):
    """A generation that does not come about; the message is one line."""


def open_store(host: str, port: int) -> dist.TCPStore:
    """A connection to the rendezvous. From now on this process's gloo groups listen on the network that leads there, and on no other."""
    listen_on(address_towards(host, port))
    return dist.TCPStore(host, port, is_master=False, timeout=CONNECT_TIMEOUT)


def meet(store: dist.Store, generation: int, rank: int, world_size: int, timeout_s: float, called_off: Callable[[], bool] = lambda: False) -> None:
    """Return once all ranks of a generation have called this.

    Raises:
        MeetingError: called off, or not all came within `timeout_s`.
    """
    place = f"generation-{generation}"
    store.set(f"{place}/here-{rank}", "1")
    everyone = [f"{place}/here-{other}" for other in range(world_size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(everyone):
        if called_off():
            raise MeetingError(f"generation {generation} has been called off")
        if time.monotonic() > deadline:
            absent = [other for other in range(world_size) if not store.check([everyone[other]])]
            raise MeetingError(f"generation {generation}: ranks {absent} did not come within {timeout_s:g} s")
        time.sleep(POLL_S)


def enter_world(store: dist.Store, generation: int, rank: int, world_size: int, accelerator: Accelerator, timeout: timedelta) -> None:
    """Make the default process group of a generation. Every rank calls this after `meet`."""
    dist.distributed_c10d._world.group_count = 0  # part of the group's keys in the store; an attempt that failed has left it counted up, here alone
    dist.init_process_group(
        accelerator.backend, store=dist.PrefixStore(f"generation-{generation}/world", store), timeout=min(timeout, CONNECT_TIMEOUT), rank=rank,
        world_size=world_size, **({"device_id": accelerator.torch_device()} if accelerator.name == "cuda" else {}))  # type: ignore[arg-type]
    allow(timeout, dist.group.WORLD, accelerator)


def make_group(ranks: list[int], backend: str, timeout: timedelta, accelerator: Accelerator) -> dist.ProcessGroup:
    """A group of its own with these ranks; every rank of the world calls this, also one that is not among them."""
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=min(timeout, CONNECT_TIMEOUT))
    if dist.get_rank() in ranks:
        allow(timeout, group, accelerator)
    return group


def allow(timeout: timedelta, group: dist.ProcessGroup | None, accelerator: Accelerator) -> None:
    """Give a built group's collectives their timeout. HCCL takes its own from HCCL_EXEC_TIMEOUT."""
    if accelerator.name != "npu":  # torch's one way to set it later
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def leave_world(close: Callable[[], None], accelerator: Accelerator, broken: bool) -> None:
    """Destroy every group of this process; `close` drops what else refers to them. Collectives with dead peers may be under way (`broken`)."""
    close()
    gc.collect()  # a group that is still referred to keeps its sockets open, and a peer waiting
    if dist.is_initialized():
        if broken and accelerator.name == "cuda":
            dist.distributed_c10d._abort_process_group()  # destroying waits for kernels that never end
        else:
            dist.destroy_process_group()
    gc.collect()


PEER_LOSS = ("connection closed by peer", "connection reset", "broken pipe", "connection refused", "timed out", "timeout", "gloo", "nccl", "hccl",
             "socket", "process group", "aborted", "communicator")
"""What backends say of a peer that is gone; all of them raise RuntimeError."""


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error is what a lost peer, or a generation called off, leads to."""
    if isinstance(error, (MeetingError, dist.DistError)):
        return True
    return type(error) is RuntimeError and any(phrase in str(error).lower() for phrase in PEER_LOSS)
