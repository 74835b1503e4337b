"""A node's memory on CUDA: each rank allocates its part on its GPU, and hands a file descriptor of it to every other
rank of the node, which maps it.

    rank 0    part 0: cuMemCreate      part 1: cuMemImport of rank 1's descriptor, over NVLink or PCIe
    rank 1    part 0: cuMemImport      part 1: cuMemCreate

The driver counts who maps an allocation: a part stays readable after its owner's death, and is freed with the last
process that maps it. (Memory of cudaIpcOpenMemHandle has no such promise.) Adds are atomic, so that there are no locks.

Descriptors travel over sockets of the host that only a node's own container sees. Ranks whose GPUs cannot reach each
other are refused.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.node_memory import NodeMemory, NodeMemoryError, check_all, of_all

MEET_S = 10.0
"""The longest that a rank waits for another one's descriptor: all of them are in the same call."""


class Memory(NodeMemory):
    """See `share_memory` for how it is made."""

    def __init__(self, device: torch.device, num_bytes: int, ranks: Sequence[int], rank: int,
                 group: dist.ProcessGroup | None) -> None:
        self.ranks, self.own, self.parts = tuple(ranks), tuple(ranks).index(rank), []
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._device, self._mappings = device, list[_Mapping]()
        allocation, refusal = None, ""
        try:
            try:
                from dhp_ray.comm import cuda_adds

                self._adds = cuda_adds
                torch.cuda.synchronize(device)  # torch's context is this thread's current one from here on
                allocation = _Allocation(device, num_bytes)
                self._mappings.append(_Mapping(allocation.handle, allocation.length, device))
                self._tensor(0, num_bytes).zero_()
                torch.cuda.synchronize(device)
            except ModuleNotFoundError as error:  # of torch's own needs on CUDA: triton, cuda-bindings
                refusal = f"rank {rank} lacks the package {error.name}"
            except _DriverError as error:
                refusal = f"rank {rank} cannot share the memory of its GPU: {error}"
            check_all(refusal, group)
            assert allocation is not None
            for member, file in enumerate(_exchanged(allocation.file, self.ranks, self.own, group)):
                if member == self.own:
                    continue
                try:
                    self._mappings.insert(member, _Mapping.of_file(file, allocation.length, device))
                except _DriverError as error:
                    refusal = f"rank {rank} cannot map the GPU memory of rank {self.ranks[member]}: {error}"
                finally:
                    os.close(file)
            check_all(refusal, group)
            self.parts = [self._tensor(member, num_bytes) for member in range(len(self.ranks))]
        except BaseException:
            self.close()
            raise
        finally:
            if allocation is not None:
                allocation.release()

    def locked(self, member: int, lock: int) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, sums: Tensor, values: Tensor) -> None:
        self._adds.add(sums, values)

    def add_rows(self, sums: Tensor, rows: Tensor, values: Tensor) -> None:
        self._adds.add_rows(sums, rows, values)

    def close(self) -> None:
        """Waits until this rank's device has done what it was given: a kernel may still read a part."""
        self.parts = []
        if self._mappings:
            with suppress(RuntimeError):  # of a device that is broken: the training thread has raised it
                torch.cuda.synchronize(self._device)
        for mapping in self._mappings:
            mapping.close()
        self._mappings = []

    def _tensor(self, member: int, num_bytes: int) -> Tensor:
        """Return a part as a tensor of this rank's device, wherever its memory is. It does not keep the mapping."""
        address = self._mappings[member].address
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, num_bytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)  # type: ignore[call-overload]


class _DriverError(RuntimeError):
    """A call of CUDA's driver failed; the message is the error's name."""


def _driver(name: str, *arguments: Any) -> Any:
    """Call a function of CUDA's driver; its result, without the status."""
    from cuda.bindings import driver

    status, *results = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _DriverError(status.name)
    return results[0] if results else None


class _Allocation:
    """Memory of a GPU with a file descriptor that names it to other processes; mappings keep it once it is released."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        from cuda.bindings import driver

        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.requestedHandleTypes = kind
        unit = _driver("cuMemGetAllocationGranularity", properties,
                       driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        self.length = -(-max(1, num_bytes) // unit) * unit
        try:
            self.handle = _driver("cuMemCreate", self.length, properties, 0)
        except _DriverError as error:
            raise NodeMemoryError(f"train.sharding=node: {self.length:,} bytes of GPU memory cannot be had: {error}; "
                                  "use more nodes, or a smaller model") from None
        self.file = int(_driver("cuMemExportToShareableHandle", self.handle, kind, 0))

    def release(self) -> None:
        os.close(self.file)
        _driver("cuMemRelease", self.handle)


class _Mapping:
    """An allocation in this process's address space, for this process's GPU to read and write."""

    def __init__(self, handle: Any, length: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self.length = length
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with ExitStack() as undo:
            reserved = _driver("cuMemAddressReserve", length, 0, 0, 0)
            undo.callback(_driver, "cuMemAddressFree", reserved, length)
            _driver("cuMemMap", reserved, length, 0, handle, 0)
            undo.callback(_driver, "cuMemUnmap", reserved, length)
            _driver("cuMemSetAccess", reserved, length, [access], 1)
            undo.pop_all()
        self._reserved, self.address = reserved, int(reserved)

    @staticmethod
    def of_file(file: int, length: int, device: torch.device) -> _Mapping:
        """Map what another process's descriptor names."""
        from cuda.bindings import driver

        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = _driver("cuMemImportFromShareableHandle", file, kind)
        try:
            return _Mapping(handle, length, device)
        finally:
            _driver("cuMemRelease", handle)

    def close(self) -> None:
        with suppress(_DriverError):  # of a device that is broken
            _driver("cuMemUnmap", self._reserved, self.length)
            _driver("cuMemAddressFree", self._reserved, self.length)


def _exchanged(file: int, ranks: Sequence[int], own: int, group: dist.ProcessGroup | None) -> list[int]:
    """Return a descriptor of every rank's allocation, by place; -1 for this rank's own.

    Each rank listens, tells the others where, connects to all of them, serves those that have connected to it and then
    takes what it was served: no rank waits for one that waits for it.
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
            except OSError as error:
                refusal = (f"rank {ranks[own]} does not reach rank {ranks[member]}, which may run in another "
                           f"container: {error.strerror}")
        check_all(refusal, group)
        member = own
        try:
            _serve(listener, file, len(others))
            for member, connection in zip(others, connections):
                _, [files[member]], *_ = socket.recv_fds(connection, 1, 1)
        except (OSError, ValueError):  # ValueError: its socket closed
            raise RuntimeError(f"connection closed by peer: rank {ranks[member]} shared no memory") from None
    return files


def _serve(listener: socket.socket, file: int, count: int) -> None:
    """Hand a descriptor to `count` processes of this user, all of which have connected."""
    while count:
        connection, _ = listener.accept()
        with connection:
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user == os.getuid():
                socket.send_fds(connection, [b"\n"], [file])
                count -= 1
