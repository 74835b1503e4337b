"""Which torch ranks a rank of the plan consists of. Only this module knows that it is one, with the same number.

    plan     rank 0      rank 1      rank 2          packs, groups, shards and replicas are of these
    torch    rank 0      rank 1      rank 2          process groups and messages are of these
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from dhp_ray.compatibility import all_gather_single


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


def gather_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, by rank, as (ranks, *shape); their shapes are equal. All torch ranks of `group`
    call this.
    """
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    all_gather_single(gathered.view(-1), tensor.reshape(-1), group=group)  # no kernel for each rank
    return gathered


def copy_from_rank(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill `tensor` on every rank with what rank `source` of `group` has in it. All torch ranks of `group` call this.
    """
    dist.broadcast(tensor, group=group, group_src=torch_peer(source))
