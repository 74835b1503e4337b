"""Numbers of all ranks, without a collective of float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import numbers_of_ranks, sums_of_counts
from dhp_ray.comm.world import is_peer_loss
from tests.ranks import run_ranks

NUMBERS = [1e8 + 1.0 / 3.0, -2.5e-7, 123456.789012345]
COUNTS = [2**40 + 1, 0, 2**33 + 5]


def numbers(rank: int) -> tuple[list[float], list[int]]:
    number = torch.tensor(NUMBERS[rank], dtype=torch.float64)
    progress = Progress()
    return (numbers_of_ranks(number, dist.group.WORLD, progress),
            sums_of_counts([COUNTS[rank], rank], dist.group.WORLD, progress))


def test_numbers_keep_the_digits_of_float64() -> None:
    """All but the last of 53 bits: two fp32 numbers have 48."""
    results = run_ranks(numbers, 3)
    for found, counts in results:
        assert found == pytest.approx(NUMBERS, rel=2.0**-47, abs=0.0)
        assert found == results[0][0]
        assert counts == [sum(COUNTS), 3]


def unusual(rank: int) -> list[float]:
    number = torch.tensor([math.inf, math.nan, 0.0][rank], dtype=torch.float64)
    return numbers_of_ranks(number, dist.group.WORLD, Progress())


def test_numbers_that_are_not_finite_arrive_as_such() -> None:
    infinite, undefined, zero = run_ranks(unusual, 3)[0]
    assert infinite == math.inf
    assert math.isnan(undefined)
    assert zero == 0.0


def test_one_rank_needs_no_group() -> None:
    assert numbers_of_ranks(torch.tensor(0.1), None, Progress()) == [pytest.approx(0.1)]
    assert sums_of_counts([7, 2], None, Progress()) == [7, 2]


def test_a_type_that_is_refused_is_no_lost_peer() -> None:
    """In the words of torch_npu and of torch; the user must see them."""
    for words in ("HCCL AllReduce & Reduce: Unsupported data type at::kDouble",
                  "Unsupported data type for HCCL process group",
                  "Input tensor data type is not supported for NCCL process group: Short",
                  "ProcessGroupHCCL does not support allreduce_coalesced"):
        assert not is_peer_loss(RuntimeError(words)), words
    assert is_peer_loss(RuntimeError("NCCL communicator was aborted on rank 1."))
