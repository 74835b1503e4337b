"""Numbers of all ranks, for sums that must be equal on every rank. No collective uses float64: HCCL refuses it.

    counts     int64, summed by the collective
    number     high + low, two fp32 numbers with 48 of float64's 53 bits; gathered, and added up in float64 on the host
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import gather_over_ranks, sum_over_ranks


def sums_of_counts(counts: Sequence[int], group: dist.ProcessGroup | None, progress: Progress) -> list[int]:
    """Return the sums of whole numbers over all ranks; every rank of `group` calls this with as many. None is for a
    single rank.
    """
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
