"""A process group over gloo that behaves as NCCL's and HCCL's do, for tests on machines without such a device.

    operation   returns at once; one thread a group runs the group's operations one after another
    peer gone   (dead or stopped): nothing is raised; whoever waits for the operation stays blocked
    abort       from another thread: the waits return, with garbage; the next operation on the group raises
    watchdog    ends the process when an operation is not over within the group's timeout, counted from its call

`tests/comm/test_conformance*.py` state each rule with its source, and run on real NCCL as well.

What is not as on a device: `Work.wait` blocks the host (there it blocks the device's stream, and the host in its next
read). Tensors of a device are copied through the host, so that several ranks can share one.
"""

from __future__ import annotations

import torch.distributed as dist

from dhp_ray.comm.device import CPU
from tests.async_backend.group import AsyncGroup

BACKEND = "asynchronous"


def register() -> None:
    """Make `init_process_group(BACKEND)` known to torch, in this process."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, AsyncGroup, devices=["cpu", "cuda"])


def compute_over(backend: str) -> None:
    """Let this process's ranks on the CPU exchange over `backend` ("gloo" or BACKEND) from here on.

    Groups that dhp_ray makes on the host's behalf, for state and checkpoints, stay gloo's.
    """
    if backend == BACKEND:
        register()
    object.__setattr__(CPU, "backend", backend)  # frozen, and imported by name everywhere
