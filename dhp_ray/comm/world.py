"""One generation of the group: its torch world over a rendezvous store that outlives the ranks.

    store    one TCPStore for the whole run, in a process that is no rank; keys begin with the generation
    world    the default process group, and the groups that are made from it

The keys of a group are deleted once its members are connected, those of a generation when the ranks of the next one
have met: in a run of weeks, groups come and go without end.

The ranks of a world or a group meet before they make it. A rank may come late: the others wait for it as long as a
collective may take. They do not wait for a rank that has died: the process that finds out closes their connections to
the store, which ends the wait.

Over gloo, the collectives of a rank raise when a peer has died. The rank leaves at once: its closed sockets free the
ranks that wait for it. Over NCCL and HCCL nothing raises, so a control thread aborts the groups.
"""

from __future__ import annotations

import fcntl
import gc
import math
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Any, cast

import torch
import torch.distributed as dist

from dhp_ray.comm.device import Accelerator
from dhp_ray.comm.progress import AbortedError
from dhp_ray.comm.ranks import own_rank, torch_ranks

_ABORTING = Lock()
CONNECT_TIMEOUT = timedelta(seconds=10)
"""The timeout of connections to the store, and of connections in gloo groups whose members are all there; a member that
dies then is waited for this long.
"""


SIOCGIFADDR = 0x8915
"""Linux's call for the IPv4 address of an interface."""


class RendezvousError(RuntimeError):
    """The ranks of a generation or a group did not come together; the message is one line."""


def open_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Connect to the rendezvous store. From then on gloo listens only on the interface that leads to it."""
    listen_on(address_towards(host, port))
    store = dist.TCPStore(host, port, is_master=False, timeout=CONNECT_TIMEOUT)
    store.set_timeout(timeout)  # NCCL and HCCL wait there for the rank that begins a group
    return store


def close_store_connections(host: str, port: int) -> None:
    """Close this process's connections to the store at an address (`host` as its IP).

    A thread that waits there for other ranks gets an error at once.
    """
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):  # the latter on macOS
        with suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    address = connection.getpeername()
                    if address[1:2] == (port,) and address[0].removeprefix("::ffff:") == host:
                        connection.shutdown(socket.SHUT_RDWR)


def meet(store: dist.Store, place: str, name: str, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
    """Return once all of `ranks` have called this, each for itself. `place`: where their keys are; `name`: what errors
    call them. RendezvousError: not all came within `timeout`.
    """
    store.set(f"{place}/here-{rank}", "1")
    if store.add(f"{place}/here", 1) == len(ranks):
        store.set(f"{place}/complete", "1")
    try:
        store.wait([f"{place}/complete"], timeout)
    except dist.DistStoreError:
        absent = [other for other in ranks if not store.check([f"{place}/here-{other}"])]
        raise RendezvousError(f"{name}: ranks {absent} did not come within {timeout.total_seconds():g} s") from None


def init_world(
    store: dist.Store, generation: int, rank: int, world_size: int, accelerator: Accelerator, timeout: timedelta
) -> None:
    """Make the default process group of a generation. Every rank calls this, and waits `timeout` for the others.
    RendezvousError: not all of them came.
    """
    meet(store, f"generation-{generation}", f"generation {generation}", rank, range(world_size), timeout)
    if rank == 0:  # no rank is in an earlier generation any more
        earlier = {f"generation-{number}" for number in range(generation)}
        _delete_keys(store, lambda key: key.partition("/")[0] in earlier)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # members connect when a group is made: then nobody reads its keys again
    # Each member reads what every other one has stored: 154 bytes, and not 8 more for each member.
    os.environ["GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"] = "1"
    # this count is part of the group's keys in the store; a failed attempt has increased it on this rank alone
    dist.distributed_c10d._world.group_count = 0
    device = accelerator.torch_device() if accelerator.name == "cuda" else None
    # If a peer dies while NCCL makes a communicator, no abort ends the wait for it. torch itself ends it after half an
    # hour, but only if communicators are made without blocking (TORCH_NCCL_USE_COMM_NONBLOCKING=1, not the default
    # since 2.7.1). This variable, which torch reads once a process, puts `comm.timeout_s` in place of the half hour.
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout.total_seconds())))
    dist.init_process_group(
        accelerator.backend, store=dist.PrefixStore(f"generation-{generation}/world", store),
        timeout=_connecting(accelerator.backend, timeout), rank=rank, world_size=world_size, device_id=device)
    if device is not None:
        # otherwise torch makes each group by splitting the world's communicator, for which every rank must come: those
        # that are not in the group wait, with the interpreter's lock held
        cast(Any, dist.group.WORLD).bound_device_id = None
    _allow(timeout, dist.group.WORLD, accelerator.backend)


def make_group(
    ranks: Sequence[int], backend: str, timeout: timedelta, options: Any = None,
    collective_timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Make a separate group of these ranks of the plan; every rank of the world calls this, even if it is not among
    them.

    Members wait `timeout` for one another, and in collectives `collective_timeout` (None: as long). `options`: those
    of the backend. RendezvousError: not all of its ranks came.
    """
    members = torch_ranks(ranks)
    member = own_rank() in ranks
    if member:
        world = dist.distributed_c10d
        place = f"group-{world._world.group_count}"  # alike on all ranks: torch numbers groups by it, too
        meet(world._get_default_store(), place, f"process group {tuple(ranks)}", own_rank(), ranks, timeout)
    group: dist.ProcessGroup = dist.new_group(members, backend=backend, timeout=_connecting(backend, timeout),
                                              pg_options=options)
    if member:
        _allow(collective_timeout or timeout, group, backend)
        if backend == "gloo":
            forget_keys(group, ranks)
    return group


def forget_keys(group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Delete what a group has left in the store. Its members call this once they are connected; the last one deletes.
    gloo's are when the group is made, those of other backends after an exchange of all with all.
    """
    store = dist.distributed_c10d._get_default_store()
    place = f"group-{group.group_name}"
    if store.add(f"{place}/connected", 1) == len(ranks):
        _delete_keys(store, lambda key: key.startswith((f"{place}/", f"{group.group_name}//")))


def _delete_keys(store: dist.Store, unused: Callable[[str], bool]) -> None:
    for key in store.list_keys():
        if unused(key):
            store.delete_key(key)


def _connecting(backend: str, timeout: timedelta) -> timedelta:
    """Return the timeout that a group is made with: gloo's members connect to one another at that time."""
    return min(timeout, CONNECT_TIMEOUT) if backend == "gloo" else timeout


def _allow(timeout: timedelta, group: dist.ProcessGroup | None, backend: str) -> None:
    """Give the collectives of an existing group their timeout, if it was made with another one."""
    if backend == "gloo":
        dist.distributed_c10d._set_pg_timeout(timeout, group)  # torch's one way to set it later


def abort_groups() -> None:
    """End what this process waits for in the groups that it has made; call it from a control thread, as often as
    needed.

    gloo has no abort: its waits end when the peer's socket closes. Every later operation of another backend's group
    raises. While the groups are being destroyed this does nothing.
    """
    if not _ABORTING.acquire(blocking=False):
        return
    try:
        groups = sorted(dist.distributed_c10d._world.pg_names.copy().items(), key=lambda named: named[1], reverse=True)
        nccl = next(filter(None, (_nccl_of(group) for group, _ in groups)), None)
        if nccl:
            nccl._group_start()  # otherwise the abort of one communicator may wait for another's
        try:
            for group, _ in groups:
                with suppress(RuntimeError):  # one that is broken must not keep the others waiting
                    group.abort()
        finally:
            if nccl:
                nccl._group_end()
    finally:
        _ABORTING.release()


def destroy_world(close: Callable[[], None], accelerator: Accelerator, broken: bool) -> None:
    """Destroy every group; `close` drops other references. `broken`: collectives with dead peers may be under way."""
    close()
    gc.collect()  # a group that is still referred to keeps its sockets open, and a peer waiting
    if dist.is_initialized() and broken:
        with _ABORTING:
            if accelerator.name == "npu":
                for group in list(dist.distributed_c10d._world.pg_map):
                    if accelerator.name in {device.type for device in group._device_types}:
                        hccl: Any = group._get_backend(accelerator.torch_device())
                        hccl.abort_hccl_comm("a peer is gone")
            dist.distributed_c10d._abort_process_group()  # destroying waits for operations that never end
    elif dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _nccl_of(group: dist.ProcessGroup) -> Any:
    """Return the group's NCCL backend; None if it has none."""
    with suppress(RuntimeError):
        backend = group._get_backend(torch.device("cuda"))
        return backend if hasattr(backend, "_group_start") else None
    return None


PEER_LOSS = ("connection closed by peer", "connection reset", "broken pipe", "connection refused", "timed out",
             "timeout", "gloo", "nccl", "hccl",
             "socket", "process group", "aborted", "communicator")
"""What backends' errors say about a lost peer; all of these errors are RuntimeErrors."""
REFUSAL = ("unsupported data type", "not supported", "does not support")
"""What they say about a call that they do not support, with their own names in it."""


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an error comes from a lost peer or an aborted generation."""
    if isinstance(error, (AbortedError, RendezvousError, dist.DistError)):
        return True
    said = str(error).lower()
    refused = any(phrase in said for phrase in REFUSAL)
    return type(error) is RuntimeError and not refused and any(phrase in said for phrase in PEER_LOSS)


def interface_of(address: str) -> str:
    """Return the name of the interface with this IPv4 address; empty if none has it, or for another kind of address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # this interface has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that a connection to `host` would come from; empty if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def listen_on(address: str) -> None:
    """Let this process's gloo groups listen on the interface of `address`, unless GLOO_SOCKET_IFNAME names one already.

    By default gloo looks up the host's name, which on many machines gives the loopback (other nodes then cannot reach
    the rank) or a public address.
    """
    name = interface_of(address)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
