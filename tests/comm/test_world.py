"""Worlds that do not come about, and those after them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.device import CPU
from dhp_ray.comm.world import enter_world, leave_world, make_group, open_store
from tests.ranks import run_processes

TIMEOUT = timedelta(seconds=20)


def after_failed_attempts(rank: int, port: int) -> float:
    """Rank 0 has tried to enter worlds whose other rank never came; rank 1 is new."""
    store = open_store("127.0.0.1", port)
    for generation in range(3 if rank == 0 else 0):
        with pytest.raises(RuntimeError):
            enter_world(store, generation, 0, 2, CPU, timedelta(seconds=0.5))
        leave_world(lambda: None, CPU, broken=True)
    enter_world(store, 3, rank, 2, CPU, TIMEOUT)
    total = torch.ones(1)
    dist.all_reduce(total, group=make_group([0, 1], "gloo", TIMEOUT, CPU))
    return total.item()


def test_an_attempt_that_failed_keeps_nobody_from_the_next_world() -> None:
    assert run_processes(after_failed_attempts, 2) == [2.0, 2.0]
