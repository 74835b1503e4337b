"""Ranks of the plan and torch ranks: what holds however many of these a rank consists of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dhp_ray.comm.ranks import copy_from_rank, own_rank, sum_over_ranks, torch_peer, torch_ranks
from tests.ranks import run_ranks


def test_every_torch_rank_is_of_one_rank_of_the_plan() -> None:
    together, alone = torch_ranks(range(5)), [torch_ranks([rank]) for rank in range(5)]
    assert len(set(together)) == len(together) == sum(map(len, alone))
    assert all(torch_peer(rank) in torch_ranks([rank]) for rank in range(5))
    assert torch_ranks([3, 1]) == [*torch_ranks([3]), *torch_ranks([1])]


def summed(rank: int) -> list[Any]:
    value = torch.tensor([float(own_rank() + 1)])
    assert dist.group.WORLD is not None
    sum_over_ranks(value, dist.group.WORLD)
    return [own_rank(), value.item()]


def test_each_rank_counts_once() -> None:
    assert run_ranks(summed, 2) == [[0, 3.0], [1, 3.0]]


def copied(rank: int) -> list[float]:
    values = torch.full((3,), float(own_rank()))
    assert dist.group.WORLD is not None
    copy_from_rank(values, 1, dist.group.WORLD)
    return list(values.tolist())


def test_all_have_what_one_rank_has() -> None:
    assert run_ranks(copied, 3) == [[1.0] * 3] * 3
