"""The mapping from ranks of the plan to torch ranks. Only this module knows it: one torch rank, with the same number.

    plan     rank 0      rank 1      rank 2          packs, groups, shards and replicas use these
    torch    rank 0      rank 1      rank 2          process groups and messages use these
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
    """The torch rank of another rank of the plan with which this process exchanges."""
    return rank


def own_rank() -> int:
    """The rank of the plan that this process belongs to."""
    return dist.get_rank()


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Sum over the ranks, in place; each rank of the plan counts once. All torch ranks of `group` must call this."""
    dist.all_reduce(tensor, group=group)


def gather_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of all ranks, by rank; all have the same shape. All torch ranks of `group` must call this."""
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def copy_from_rank(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Copy `tensor` of rank `source` of `group` to `tensor` on every rank. All torch ranks of `group` must call this.
    """
    dist.broadcast(tensor, group=group, group_src=torch_peer(source))
