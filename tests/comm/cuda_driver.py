"""CUDA's driver as far as a node's memory needs it, on the CPU: an allocation is an in-memory file, a mapping is mmap.

Handles and descriptors are descriptors of that file, as on a device: the memory is freed with the last that refers to
it. Functions return what those of cuda.bindings.driver return: a status, and a result if there is one.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

LARGEST = 1 << 40
"""More bytes than this are out of memory."""
PAGE = 2 << 20
FIXED = 0x10  # MAP_FIXED: in the place of what was reserved

CUresult = enum.Enum("CUresult", "CUDA_SUCCESS CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_NOT_SUPPORTED")
CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

_c = ctypes.CDLL(None, use_errno=True)
_c.mmap.restype = ctypes.c_void_p
_c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def CUmemAllocationProp() -> SimpleNamespace:  # noqa: N802  (the driver's name)
    return SimpleNamespace(location=SimpleNamespace())


def CUmemAccessDesc() -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(location=SimpleNamespace())


def cuMemGetAllocationGranularity(properties: Any, flag: int) -> tuple[CUresult, int]:  # noqa: N802
    return CUresult.CUDA_SUCCESS, PAGE


def cuMemCreate(length: int, properties: Any, flags: int) -> tuple[CUresult, int]:  # noqa: N802
    assert length % PAGE == 0, "the driver refuses other lengths"
    if length > LARGEST:
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
    file = os.memfd_create("cuda")
    os.ftruncate(file, length)
    return CUresult.CUDA_SUCCESS, file


def cuMemExportToShareableHandle(handle: int, kind: int, flags: int) -> tuple[CUresult, int]:  # noqa: N802
    return CUresult.CUDA_SUCCESS, os.dup(handle)


def cuMemImportFromShareableHandle(file: int, kind: int) -> tuple[CUresult, int]:  # noqa: N802
    return CUresult.CUDA_SUCCESS, os.dup(file)


def cuMemRelease(handle: int) -> tuple[CUresult]:  # noqa: N802
    os.close(handle)
    return (CUresult.CUDA_SUCCESS,)


def cuMemAddressReserve(length: int, alignment: int, address: int, flags: int) -> tuple[CUresult, int]:  # noqa: N802
    return CUresult.CUDA_SUCCESS, _mapped(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def cuMemMap(address: int, length: int, offset: int, handle: int, flags: int) -> tuple[CUresult]:  # noqa: N802
    _mapped(address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | FIXED, handle)
    return (CUresult.CUDA_SUCCESS,)


def cuMemSetAccess(address: int, length: int, access: list[Any], count: int) -> tuple[CUresult]:  # noqa: N802
    return (CUresult.CUDA_SUCCESS,)


def cuMemUnmap(address: int, length: int) -> tuple[CUresult]:  # noqa: N802
    """The addresses stay reserved."""
    _mapped(address, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED, -1)
    return (CUresult.CUDA_SUCCESS,)


def cuMemAddressFree(address: int, length: int) -> tuple[CUresult]:  # noqa: N802
    assert _c.munmap(address, length) == 0, os.strerror(ctypes.get_errno())
    return (CUresult.CUDA_SUCCESS,)


def _mapped(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    found = _c.mmap(address, length, protection, flags, file, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)


def install() -> ModuleType:
    """Install this module as cuda.bindings.driver. Returns it, so that a test can replace its functions."""
    import torch

    driver = sys.modules[__name__]
    package = ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    sys.modules |= {"cuda": ModuleType("cuda"), "cuda.bindings": package, "cuda.bindings.driver": driver}
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *device: None
    return driver
