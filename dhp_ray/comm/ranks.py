"""Which torch ranks a rank of the plan consists of. Only this module knows that it is one, with the same number.

    plan     rank 0      rank 1      rank 2          packs, groups, shards and replicas are of these
    torch    rank 0      rank 1      rank 2          process groups and messages are of these
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def torch_ranks(ranks: Iterable[int]) -> list[int]:
    """All torch ranks of these ranks of the plan, in their order."""
    return list(ranks)


def torch_peer(rank: int) -> int:
    """The torch rank of another rank of the plan that this process exchanges with."""
    return rank


def own_rank() -> int:
    """The rank of the plan that this process belongs to."""
    return dist.get_rank()


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum in place what every rank of the plan has; each rank counts once. All torch ranks of `group` call this."""
    dist.all_reduce(tensor, group=group)


def gather_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensor of every rank, by rank; their shapes are equal. All torch ranks of `group` call this."""
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def copy_from_rank(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill `tensor` on every rank with what rank `source` of `group` has in it. All torch ranks of `group` call this.
    """
    dist.broadcast(tensor, group=group, group_src=torch_peer(source))
