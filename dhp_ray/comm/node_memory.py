"""Memory that all ranks of a node map: each owns a part, and every other rank reads it and adds to it without the
owner's help.

    CPU    in-memory files (`host_node_memory.py`)
    CUDA   allocations of the GPUs, which the other GPUs of the node reach (`cuda_node_memory.py`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.ranks import gather_over_ranks


class NodeMemoryError(ValueError):
    """Ranks of a node cannot share memory; the message is one line."""


class NodeMemoryRefusedError(NodeMemoryError):
    """The same, raised on all ranks of the node alike."""


class NodeMemory(ABC):
    """The parts of all ranks of a node, equally long and zero at first.

    `parts` are uint8 tensors on the ranks' device, one per member, in the order of `ranks`; `own` is the place of this
    rank among them.
    """

    ranks: tuple[int, ...]
    own: int
    parts: list[Tensor]

    @abstractmethod
    def locked(self, member: int, lock: int) -> AbstractContextManager[None]:
        """Return a context in which `add` and `add_rows` to a member's part lose nothing: nobody else who holds lock
        number `lock` of that part adds at the same time.
        """

    @abstractmethod
    def add(self, sums: Tensor, values: Tensor) -> None:
        """Add `values` (n,) of any floating type to `sums` (n,), fp32, a view of one of the parts."""

    @abstractmethod
    def add_rows(self, sums: Tensor, rows: Tensor, values: Tensor) -> None:
        """Add `values` (K, row) of any floating type to rows `rows` (K,) of `sums` (N, row), fp32, a view of one of the
        parts. Rows may repeat; those outside 0 to N - 1 are skipped.
        """

    @abstractmethod
    def close(self) -> None:
        """Forget all parts; call it while no lock is held and no tensor of a part is in use. The memory is freed once
        no process maps it, whether its owner lives or not.
        """


def share_memory(
    device: torch.device, num_bytes: int, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None
) -> NodeMemory:
    """Make the memory of a node, `num_bytes` a rank. All of `ranks`, the node's ranks, call this. `group`: their group
    over the CPU (None: one rank).

    Raises:
        NodeMemoryError: a process may not map the memory of another one, raised on all ranks; or there is no room.
        ValueError: a device whose ranks share no memory, or several ranks without a group.
    """
    if len(ranks) > 1 and group is None:
        raise ValueError(f"node memory: got no group for {len(ranks)} ranks")
    if device.type == "cpu":
        from dhp_ray.comm.host_node_memory import HostNodeMemory

        return HostNodeMemory(num_bytes, ranks, rank, group)
    if device.type == "cuda":
        from dhp_ray.comm.cuda_node_memory import CudaNodeMemory

        return CudaNodeMemory(device, num_bytes, ranks, rank, group)
    raise ValueError(f"node memory: got device {device.type!r}; allowed: cpu, cuda")


def of_all(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensor of every rank of a node, by place."""
    return [tensor] if group is None else list(gather_over_ranks(tensor, group))


def check_all(refusal: str, group: dist.ProcessGroup | None) -> None:
    """Raise NodeMemoryRefusedError on all ranks of a node if one of them has a reason, `refusal`, that keeps it from
    mapping another's memory. A peer that has died has no memory to map: then this raises as a collective does.
    """
    if any(bool(refused) for refused in of_all(torch.tensor(int(bool(refusal))), group)):
        raise NodeMemoryRefusedError(f"train.sharding=node: {refusal or 'a rank cannot open the memory of another'}; "
                                     "allowed here: train.sharding=whole")
