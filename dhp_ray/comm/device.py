"""The device that a rank computes on, its communication backend, and the Ray resource that reserves it.

Importing this module does not import torch: the driver only asks it for resource names.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dhp_ray.errors import first_line

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Accelerator:
    """`resource` is what one worker reserves in Ray in addition to CPUs; None if it needs only CPUs."""

    name: str
    backend: str
    resource: str | None
    files: str = ""
    """The pattern of its device files: the device's driver makes one for each device."""
    visible: str = ""
    """The environment variable that hides some of its devices."""
    group_bytes: int = 0
    """The approximate device memory of a process group of packs, which is made with `pack_options`."""
    world_bytes: int = 0
    """That of any other process group."""

    def num_devices(self) -> int:
        """Return the most devices of this machine, by their files: a library takes seconds to import."""
        if not self.files:
            return os.cpu_count() or 1
        found, listed = len(glob.glob(self.files)), os.environ.get(self.visible)
        if listed is None:
            return found
        shown = takewhile(lambda entry: entry not in ("", "NoDevFiles") and not entry.startswith("-"),
                          (entry.strip() for entry in listed.split(",")))  # the first that names none hides the rest
        return min(found, len(list(shown)))

    def torch_device(self) -> torch.device:
        """Return the torch device, the only one that a rank sees, because Ray shows it no other."""
        import torch

        return torch.device(self.name) if self.name == "cpu" else torch.device(self.name, 0)

    def activate(self) -> None:
        """Make the device this process's current one; NCCL and HCCL take it from there.

        From then on the process outlives a lost peer: torch's watchdogs no longer end it. Call it before anything takes
        memory of the device.
        """
        os.environ.update(WATCHDOGS)
        if self.name == "cuda" and not any(name in os.environ for name in ALLOCATOR):
            os.environ[ALLOCATOR[0]] = "expandable_segments:True"
        import torch

        if self.name == "npu":
            import torch_npu  # noqa: F401  (importing it adds the device to torch)
        if self.name != "cpu":
            torch.get_device_module(self.name).set_device(0)

    def stop(self) -> None:
        """End what the device computes and waits for, from a control thread. On CUDA, aborting the groups does that."""
        if self.name == "npu":
            import torch

            torch.get_device_module(self.name).stop_device(0)

    def restart(self) -> None:
        """Let a device that may have been stopped compute again; its memory is unchanged."""
        if self.name == "npu":
            import torch

            torch.get_device_module(self.name).restart_device(0)

    def compute_in(self, precision: str) -> None:
        """Set the type that this process is going to compute in, before its first matrix product: oneDNN reads this
        setting once.

        oneDNN's bf16 kernels use AMX instructions; some virtual machines advertise them and then kill the process that
        uses them.
        """
        if self.name == "cpu" and precision == "bf16":
            os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

    def compute_deterministically(self) -> None:
        """Make every sum in matrix products, kernels and collectives have a fixed order; call it before this process's
        first product. An operator without such a version raises.
        """
        import torch

        os.environ.update(DETERMINISTIC)
        torch.use_deterministic_algorithms(True)
        # otherwise each new buffer is written once more
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def pool_groups(self, memory_bytes: int) -> int:
        """Return the most process groups that the pool keeps on devices with this much memory."""
        fitting = int(POOL_SHARE * memory_bytes / self.group_bytes) if self.group_bytes else POOL_GROUPS
        return max(1, min(POOL_GROUPS, fitting))

    def pack_options(self) -> Any:
        """Return the options that a group of packs is made with: small buffers where their size can be chosen."""
        if self.name != "npu":
            return None
        import torch_npu

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": HCCL_BUFFER_MB}
        return options

    def model_name(self) -> str:
        """Return the name that the device's driver has for it (NVIDIA H100 80GB HBM3); on the CPU the processor's."""
        if self.name == "cpu":
            return processor_name()
        import torch

        return str(torch.get_device_module(self.name).get_device_name(0))

    def memory_bytes(self) -> int:
        """Return the memory of one device. On the CPU: that of this machine or container, for all ranks on it."""
        import torch

        if self.name != "cpu":
            return int(torch.get_device_module(self.name).mem_get_info(0)[1])
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        contained = limit.read_text().strip() if limit.exists() else "max"
        return physical if contained == "max" else min(physical, int(contained))


POOL_GROUPS, POOL_SHARE = 64, 0.05
"""The most groups that `auto` keeps (gloo's groups take a socket per pair of ranks), and the share of a device's memory
for them.
"""
HCCL_BUFFER_MB, HCCL_DEFAULT_MB = 32, 200
"""HCCL takes two buffers per group, of the second size by default: 64 groups would take 25 GB."""
NCCL_BYTES = 64 * 2**20
"""An unmeasured estimate: what a communicator takes grows with its members and links."""

CONNECTIONS, FEWEST_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", 8
"""The environment variable that sets how many queues a CUDA device has for its streams, and the CUDA driver's own
number. With fewer, streams share a queue: a rank's gather waits behind an exchange, whose peer waits behind its gather.
"""

CPU = Accelerator("cpu", "gloo", None)
CUDA = Accelerator("cuda", "nccl", "GPU", "/dev/nvidia[0-9]*", "CUDA_VISIBLE_DEVICES", NCCL_BYTES, NCCL_BYTES)
NPU = Accelerator("npu", "hccl", "NPU", "/dev/davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES", 2 * HCCL_BUFFER_MB * 2**20,
                  2 * HCCL_DEFAULT_MB * 2**20)
WATCHDOGS = {f"TORCH_{library}_{name}": "0" for library in ("NCCL", "HCCL")
             for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC")}
"""By default torch's watchdogs end the process when a peer is gone, and so do the threads that watch them; a survivor
must keep its state and join the next generation. A watchdog that has seen an error also waits for a dump of what it
knows, a minute by default, and its group cannot be destroyed meanwhile. Process groups read these when they are made.
"""
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Torch's settings of its memory, and their older name. Packs of ever new sizes leave gaps between its segments, unless
these may grow.
"""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"}
"""Read by cuBLAS at its first product, by HCCL and by CANN's products."""
ACCELERATORS = {accelerator.name: accelerator for accelerator in (CPU, CUDA, NPU)}


def cores() -> list[int]:
    """Return the cores that this process may run on; all of the machine where the system does not tell (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def processor_name() -> str:
    """Return the name of this machine's CPU, such as AMD EPYC 9654; the architecture if the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.machine()


def allow_streams() -> str:
    """Let a CUDA device run its streams side by side: scripts for Megatron-LM export CUDA_DEVICE_MAX_CONNECTIONS=1, for
    an order that we do not rely on. Call it before this process looks for devices, which is when the driver reads it.

    Returns what to tell the user, in one line; empty if nothing had to be changed.
    """
    given = os.environ.get(CONNECTIONS)
    if given is None or (given.isdecimal() and int(given) >= FEWEST_CONNECTIONS):
        return ""
    del os.environ[CONNECTIONS]
    return (f"{CONNECTIONS}={given} is not used for the workers: with fewer than {FEWEST_CONNECTIONS}, gathers and "
            "exchanges of ranks can wait for one another for ever")


def choose(name: str) -> Accelerator:
    """Return the accelerator called `name`, or with `auto` the best one of this machine: npu, else cuda, else cpu.

    Raises ValueError when its device cannot be found here.
    """
    allow_streams()
    if name == "auto":
        return next(accelerator for accelerator in (NPU, CUDA, CPU) if not _lack(accelerator))
    if lack := _lack(ACCELERATORS[name]):
        raise ValueError(f"cluster.device: got {name!r}, but {lack}; auto takes what there is")
    return ACCELERATORS[name]


def _lack(accelerator: Accelerator) -> str:
    """Return what keeps this machine from using the accelerator; empty if nothing does."""
    if accelerator is CPU:
        return ""
    if accelerator is NPU:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed on this machine (pip install -e '.[npu]')"
        try:
            import torch_npu  # noqa: F401  (importing it adds the device to torch)
        except (ImportError, OSError, RuntimeError) as error:
            return f"torch_npu cannot be imported on this machine ({first_line(error)}); it needs CANN"
    import torch

    there = torch.get_device_module(accelerator.name).is_available()
    return "" if there else f"this machine has no {accelerator.name} device that torch can use"
