"""Which torch ranks a rank of the plan consists of, and collectives over all ranks of the plan. Only this module knows
that it is one, with the same number.

    plan     rank 0      rank 1      rank 2          packs, groups, shards and replicas are of these
    torch    rank 0      rank 1      rank 2          process groups and messages are of these

Sums that must be equal on every rank use no float64: HCCL refuses it.

    counts     int64, summed by the collective
    number     high + low, two fp32 numbers with 48 of float64's 53 bits; gathered, added up in float64 on the host
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.progress import Progress
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
    """Return the equally shaped tensors of all ranks, as (ranks, *shape). All torch ranks call this."""
    gathered = tensor.new_empty(group.size(), *tensor.shape)
    all_gather_single(gathered.view(-1), tensor.reshape(-1), group=group)  # no kernel for each rank
    return gathered


def copy_from_rank(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Fill `tensor` on every rank of `group` with what rank `source` has in it. All torch ranks call this."""
    dist.broadcast(tensor, group=group, group_src=torch_peer(source))


def sums_of_counts(counts: Sequence[int], group: dist.ProcessGroup | None, progress: Progress) -> list[int]:
    """Return the sums of whole numbers over all ranks, which all call this. `group` None: a single rank."""
    if group is None:
        return list(counts)
    totals = torch.tensor(counts, dtype=torch.int64, device=progress.device)
    with progress.waiting("counts of other ranks"):
        sum_over_ranks(totals, group)
    return [int(total) for total in progress.read(totals)]


def numbers_of_ranks(number: Tensor, group: dist.ProcessGroup | None, progress: Progress) -> list[float]:
    """Return the number of every rank, by rank, equal on all of them. `number` has no dimension, and any floating type.

    `progress` belongs to the group's device. The number is within fp32's range; every rank of `group` calls this.
    """
    if group is None:
        return [float(progress.read(number))]
    high = number.to(torch.float32)
    low = torch.where(high.isfinite(), number - high, 0.0).to(torch.float32)
    with progress.waiting("numbers of other ranks"):
        pairs = gather_over_ranks(torch.stack([high, low]).to(progress.device), group)
    return [sum(pair) for pair in progress.read(pairs)]


def all_well(well: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether all ranks are `well`; waits for the slowest. `group` is of gloo; None: there is one rank."""
    if group is None:
        return well
    failed = torch.tensor(int(not well))
    sum_over_ranks(failed, group)
    return not failed.item()
