"""The ranks that share the experts of every layer (expert parallelism), and how tokens reach them.

    12 ranks, E = 4      group     0 1 2 3 | 4 5 6 7 | 8 9 10 11     each rank of a group has a quarter of the experts
                         holders   0 4 8 | 1 5 9 | 2 6 10 | 3 7 11   ranks with the same ones, which they shard

    gather   every rank of a group gets the tokens of all, each rank's padded to the same number
    scatter  a rank gets what all of them have computed for its tokens, and adds it up

Groups have nothing to do with packs: ranks of a group may run packs of any degree, or none. A token that goes to k
experts on as many ranks would be sent k times, so for E of at most k this moves no more than sending tokens to their
experts alone; and no rank has to know how many will come.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import gather_over_ranks
from dhp_ray.comm.world import make_group


class ExpertGroup:
    """The group of one rank. `num_tokens`: to how many a rank's tokens are padded, the same on all ranks of the group;
    set it before a pack runs.
    """

    def __init__(self, size: int, index: int, group: dist.ProcessGroup, holders: dist.ProcessGroup,
                 progress: Progress) -> None:
        self.size, self.index, self.holders = size, index, holders
        self.group, self.progress = group, progress
        self.num_tokens = 0

    def gather(self, tokens: Tensor, padding: float = 0) -> Tensor:
        """(E num_tokens, D) of every rank's `tokens` (L, D), in the order of ranks. Every rank of the group calls this.
        """
        padded = F.pad(tokens, (0, 0, 0, self.num_tokens - len(tokens)), value=padding).contiguous()
        with self.progress.waiting("tokens of other ranks"):
            found = gather_over_ranks(padded, self.group)
        return found.flatten(0, 1)

    def scatter(self, partial: Tensor, num_tokens: int) -> Tensor:
        """The first L = `num_tokens` (L, D) of this rank's rows of `partial` (E num_tokens, D), summed over all ranks
        of the group, which all call this.
        """
        received = torch.empty_like(partial)
        with self.progress.waiting("tokens of other ranks"):
            dist.all_to_all_single(received, partial.contiguous(), group=self.group)
        return received.view(self.size, -1, partial.shape[1])[:, :num_tokens].sum(0)

    def release(self) -> None:
        """Drop the references to the groups, which would keep their sockets open."""
        gone: Any = None
        self.group = self.holders = gone


def open_expert_group(
    size: int, rank: int, num_ranks: int, backend: str, timeout: timedelta, progress: Progress
) -> ExpertGroup:
    """Make the groups of `size` ranks of which `rank` is in one; every rank calls this alike. `size` divides the ranks.
    """
    with progress.waiting("making of the groups of experts"):
        groups = [make_group(range(first, first + size), backend, timeout) for first in range(0, num_ranks, size)]
        holders = [make_group(range(index, num_ranks, size), backend, timeout) for index in range(size)]
        mine = ExpertGroup(size, rank % size, groups[rank // size], holders[rank % size], progress)
        for group in (groups[rank // size], mine.holders):  # NCCL and HCCL connect ranks in their first collective
            gather_over_ranks(torch.zeros(1, device=progress.device), group)
        progress.synchronize()
    return mine
