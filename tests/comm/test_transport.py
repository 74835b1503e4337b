from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.device import CPU
from dhp_ray.comm.transport import Transport
from tests.ranks import run_ranks

TIMEOUT = timedelta(seconds=20)
PLAN = [((0, 1), 0), ((1, 2), 1), ((2, 0), 2), ((0, 1, 2), 3), ((1, 0), 4)]


def run_plan(rank: int, name: str, capacity: int) -> tuple[list[float], dict[str, int]]:
    """Walk the plan twice; in each pack everyone sends its rank to the next member."""
    transport = Transport(name, rank, 3, CPU, capacity, TIMEOUT)
    found = []
    for _ in range(2):
        transport.prepare([ranks for ranks, _ in PLAN])
        for ranks, pack_index in PLAN:
            if rank in ranks:
                link = transport.link(ranks, pack_index)
                box = torch.empty(1)
                link.exchange([(torch.tensor([float(rank)]), (link.index + 1) % link.size)],
                              [(box, (link.index - 1) % link.size)]).wait()
                found.append(box.item())
    counters = transport.counters()
    transport.close()
    return found, counters


@pytest.mark.parametrize(("name", "capacity", "counters"), [
    ("parent", 0, {}),
    ("pool", 8, {"hits": 4, "creations": 4, "evictions": 0, "overflows": 0}),
    ("pool", 2, {"hits": 2, "creations": 2, "evictions": 0, "overflows": 4}),
    ("pool", 0, {"hits": 0, "creations": 0, "evictions": 0, "overflows": 8}),
])
def test_packs_reach_their_members(name: str, capacity: int, counters: dict[str, int]) -> None:
    lefts = [[1.0, 2.0, 2.0, 1.0], [0.0, 2.0, 0.0, 0.0], [1.0, 0.0, 1.0]]
    for rank, (found, counted) in enumerate(run_ranks(run_plan, 3, name, capacity)):
        assert found == lefts[rank] * 2
        assert counted == counters


def parent_beside_collectives(rank: int) -> float:
    """A reduction over the world is under way while the packs of the parent exchange."""
    transport = Transport("parent", rank, 3, CPU, 0, TIMEOUT)
    total = torch.ones(100_000)
    if rank < 2:
        link = transport.link((0, 1), 0)
        box = torch.empty(1)
        pending = link.exchange([(torch.tensor([float(rank)]), 1 - link.index)], [(box, 1 - link.index)])
    work = dist.all_reduce(total, async_op=True)
    if rank < 2:
        pending.wait()
        assert box.item() == 1 - rank
    work.wait()
    return float(total.mean())


def test_the_parent_is_a_group_of_its_own() -> None:
    assert run_ranks(parent_beside_collectives, 3) == [3.0] * 3


@pytest.mark.parametrize("name", ["pool", "parent"])
def test_a_world_of_one_rank_needs_no_group(name: str) -> None:
    transport = Transport(name, 0, 1, CPU, 4, TIMEOUT)
    transport.prepare([])
    assert transport.link((0,), 7).size == 1
    transport.close()
