"""A step needs nothing that a device's collectives refuse, and gives over them what it gives over gloo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from dhp_ray.comm.progress import StreamTimestamp
from dhp_ray.train.rank_step import PackRun, RankStep, TimedRun
from tests.async_backend.rules import EMULATED, Backend, run_group
from tests.train.networks import Network, make_engine, train_step


def one_step(rank: int, device: torch.device) -> tuple[float, tuple[float, ...]]:
    """The gradient norm of an update, and the totals of a loss of 1.1 and a loss of 2.1, of 3 and 4 tokens."""
    network = Network()
    engine = make_engine(network, rank, 2)
    update = train_step(engine, network, 0, rank, 2)
    step = RankStep(cast(Any, SimpleNamespace(num_experts=0)), engine, cast(Any, None), dist.group.WORLD, device)
    now, loss = StreamTimestamp(device), torch.tensor(1.1 + rank, dtype=torch.float64)
    run = PackRun(TimedRun(0, now, now, ()), loss, 3 + rank, num_images=2, moved_bytes=0, routed=None)
    return update.gradient_norm, tuple(step._totals([run]))


def test_an_update_and_its_totals_need_no_type_that_is_refused() -> None:
    expected = run_group(one_step, Backend("gloo", "cpu"))
    found = run_group(one_step, EMULATED)
    assert found == expected
    assert found[0] == found[1]
    norm, (loss_sum, num_valid_tokens, num_images, experts) = found[0]
    assert experts is None
    assert norm > 0.0
    assert abs(loss_sum - 3.2) < 1e-13
    assert (num_valid_tokens, num_images) == (7, 4)
