"""A node's memory on CUDA: each rank allocates its part on its GPU, and hands a file descriptor of it to every other
rank of the node, which maps it.

    rank 0    part 0: cuMemCreate                          part 1: cuMemImport of rank 1's descriptor
    rank 1    part 0: cuMemImport of rank 0's descriptor   part 1: cuMemCreate

The driver counts who maps an allocation: a part stays readable after its owner's death, and is freed with the last
process that maps it. (Memory of cudaIpcOpenMemHandle has no such promise.)

Adds are atomic, so there are no locks. Two GPUs that map each other's memory need not have atomic adds to it (over PCIe
they seldom do): ranks try it out, and are refused if an add got lost.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.node_files import closing, exchanged
from dhp_ray.comm.node_memory import NodeMemory, check_all
from dhp_ray.errors import first_line

TRIED_WORDS, TRIED_ADDS = 64, 4096
"""How many sums of a part all ranks add to at the same time, and how often each, to see whether an add gets lost."""


class CudaNodeMemory(NodeMemory):
    """See `share_memory` for how it is made."""

    def __init__(self, device: torch.device, num_bytes: int, ranks: Sequence[int], rank: int,
                 group: dist.ProcessGroup | None) -> None:
        self.ranks, self.own, self.parts = tuple(ranks), tuple(ranks).index(rank), []
        self._device = torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
        self._mappings: list[_Mapping] = []
        try:
            with _Allocation.made(self._device, num_bytes, f"rank {rank}", group) as allocation:
                files = exchanged(allocation.file, self.ranks, self.own, group)
                with closing(files):
                    refusal = self._map(allocation, files)
                check_all(refusal, group)
            self.parts = [self._tensor(member, num_bytes) for member in range(len(self.ranks))]
            self._try_adds(group)
        except BaseException:
            self.close()
            raise

    def locked(self, member: int, lock: int) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, sums: Tensor, values: Tensor) -> None:
        from dhp_ray.comm import cuda_adds

        cuda_adds.add(sums, values)

    def add_rows(self, sums: Tensor, rows: Tensor, values: Tensor) -> None:
        from dhp_ray.comm import cuda_adds

        cuda_adds.add_rows(sums, rows, values)

    def close(self) -> None:
        """Waits until this rank's device has done what it was given: a kernel may still read a part."""
        self.parts = []
        if self._mappings:
            with suppress(RuntimeError):  # of a device that is broken: the training thread has raised it
                torch.cuda.synchronize(self._device)
        for mapping in self._mappings:
            mapping.close()
        self._mappings = []

    def _map(self, allocation: _Allocation, files: Sequence[int]) -> str:
        """Map all parts, and clear this rank's own; what keeps this rank from it, or nothing."""
        for member, file in enumerate(files):
            try:
                self._mappings.append(_Mapping(allocation.handle, allocation.length, self._device) if file < 0
                                      else _Mapping.of_file(file, allocation.length, self._device))
            except _DriverError as error:
                return f"rank {self.ranks[self.own]} cannot map the GPU memory of rank {self.ranks[member]}: {error}"
        self._tensor(self.own, allocation.length).zero_()
        torch.cuda.synchronize(self._device)
        return ""

    def _try_adds(self, group: dist.ProcessGroup | None) -> None:
        """Add to the same sums of every part at the same time as all other ranks, and clear them if no add is lost.

        Raises:
            NodeMemoryError: an add got lost, or the kernels cannot be compiled; on all ranks.
        """
        refusal, tried = "", [part[: 4 * TRIED_WORDS].view(torch.float32)[None] for part in self.parts
                              if len(part) >= 4 * TRIED_WORDS]
        rows = torch.zeros(TRIED_ADDS, dtype=torch.int64, device=self._device)
        try:
            for dtype in (torch.bfloat16, torch.float32):  # compiled here, not in the midst of a step
                values = torch.ones(TRIED_ADDS, TRIED_WORDS, dtype=dtype, device=self._device)
                for sums in tried[:1]:
                    self.add(sums[0], torch.zeros(TRIED_WORDS, dtype=dtype, device=self._device))
                    self.add_rows(sums, rows[:1], values[:1] * 0)
            torch.cuda.synchronize(self._device)
        except ImportError as error:
            refusal = f"rank {self.ranks[self.own]} lacks a package of torch's CUDA wheels: {error}"
        except Exception as error:
            refusal = f"rank {self.ranks[self.own]} cannot compile the kernels of the adds: {first_line(error)}"
        check_all(refusal, group)
        for place in range(len(tried)):
            self.add_rows(tried[(self.own + place) % len(tried)], rows, values)
        torch.cuda.synchronize(self._device)
        check_all("", group)  # all have added
        wanted = float(TRIED_ADDS * len(self.ranks))
        if tried and not bool((tried[self.own] == wanted).all()):
            refusal = (f"adds of other GPUs to the memory of rank {self.ranks[self.own]} got lost: they are not atomic "
                       "(nvidia-smi topo -p2p a)")
        check_all(refusal, group)
        if tried:
            tried[self.own].zero_()
        torch.cuda.synchronize(self._device)
        check_all("", group)  # all are zero

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

        torch.cuda.synchronize(device)  # torch's context is this thread's current one from here on
        gc.collect()
        torch.cuda.empty_cache()  # the driver does not know what torch keeps for later
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.requestedHandleTypes = kind
        unit = _driver("cuMemGetAllocationGranularity", properties,
                       driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        self.length = -(-max(1, num_bytes) // unit) * unit
        self.handle = _driver("cuMemCreate", self.length, properties, 0)
        try:
            self.file = int(_driver("cuMemExportToShareableHandle", self.handle, kind, 0))
        except BaseException:
            _driver("cuMemRelease", self.handle)
            raise

    @staticmethod
    @contextmanager
    def made(device: torch.device, num_bytes: int, who: str, group: dist.ProcessGroup | None) -> Iterator[_Allocation]:
        """An allocation on every rank of the group; it is released afterwards.

        Raises:
            NodeMemoryError: a rank has none, raised on all ranks.
        """
        allocation, refusal = None, ""
        try:
            try:
                allocation = _Allocation(device, num_bytes)
            except ImportError as error:
                refusal = f"{who} lacks a package of torch's CUDA wheels: {error}"
            except _DriverError as error:
                refusal = (f"{who} has no room for {num_bytes:,} bytes" if "OUT_OF_MEMORY" in str(error)
                           else f"{who} cannot share the memory of its GPU: {error}")
            check_all(refusal, group)
            assert allocation is not None
            yield allocation
        finally:
            if allocation is not None:
                os.close(allocation.file)
                with suppress(_DriverError):  # of a device that is broken
                    _driver("cuMemRelease", allocation.handle)


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
