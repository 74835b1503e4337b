import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.device import CPU
from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.comm.transport import Transport
from tests.ranks import run_ranks

TIMEOUT = timedelta(seconds=20)
Ranks = tuple[int, ...]
State = tuple[list[Ranks], tuple[int, ...]]

# Plans of consecutive steps, and the pool of 3 after each: groups from least to most recently used,
# then (hits, creations, evictions, overflows).
STEPS: list[tuple[list[Ranks], State]] = [
    ([(0, 1), (2, 3)], ([(0, 1), (2, 3)], (0, 2, 0, 0))),
    ([(0, 1, 2)], ([(0, 1), (2, 3), (0, 1, 2)], (0, 3, 0, 0))),
    ([(0, 1), (1, 3)], ([(0, 1, 2), (0, 1), (1, 3)], (1, 4, 1, 0))),  # (2, 3) is the oldest
    ([(1, 3), (0, 2), (0, 1, 2)], ([(1, 3), (0, 1, 2), (0, 2)], (3, 5, 2, 0))),  # (0, 1, 2) is old, but this plan's
    ([(0, 3), (1, 2), (0, 1), (2, 3)], ([(0, 3), (1, 2), (0, 1)], (3, 8, 5, 1))),  # no room for the fourth
    ([(1, 0), (0, 1), (2,)], ([(0, 3), (1, 2), (0, 1)], (4, 8, 5, 1))),  # one group in either order; alone needs none
    ([], ([(0, 3), (1, 2), (0, 1)], (4, 8, 5, 1))),
]


def walk_steps(rank: int) -> list[State]:
    transport = Transport("pool", rank, 4, CPU, 3, TIMEOUT)
    states: list[State] = []
    for plan, _ in STEPS:
        transport.prepare(plan)
        assert transport._pool is not None
        states.append((transport._pool.held(), tuple(transport.counters().values())))
        for ranks in plan:
            if rank in ranks:
                assert sum_over(transport.link(ranks, 0)) == sum(ranks)
    transport.close()
    return states


def sum_over(link: PackCommunicator) -> float:
    others = [member for member in range(link.size) if member != link.index]
    received = [torch.zeros(1) for _ in others]
    mine = torch.tensor([float(link.ranks[link.index])])
    link.exchange([(mine, member) for member in others], list(zip(received, others))).wait()
    return float(mine + sum(received))


def test_all_ranks_keep_the_same_state() -> None:
    results = run_ranks(walk_steps, 4)
    assert results[0] == [state for _, state in STEPS]
    assert all(other == results[0] for other in results)


def cycle_groups(rank: int) -> list[int]:
    """Open files and threads after each of many evictions."""
    transport = Transport("pool", rank, 3, CPU, 2, TIMEOUT)
    pairs = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
    counts = []
    for step in range(24):
        transport.prepare([pairs[step % 4]])
        dist.barrier()
        counts.append(len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task")))
    assert transport.counters()["evictions"] == 22
    return counts


def test_evicted_groups_give_back_sockets_and_threads() -> None:
    for counts in run_ranks(cycle_groups, 3):
        assert max(counts[20:]) <= max(counts[4:8]) + 2, counts


def timeout_of_a_new_group(rank: int) -> str:
    """The pool's timeout holds for its groups, whatever the world's is."""
    transport = Transport("pool", rank, 2, CPU, 1, timedelta(seconds=3))
    transport.prepare([(0, 1)])
    if rank == 1:
        dist.barrier()
        return ""
    try:
        transport.link((0, 1), 0).exchange([], [(torch.empty(1), 1)]).wait()
    except RuntimeError as error:
        message = str(error)
    dist.barrier()
    return message


@pytest.mark.gloo("a device's watchdog ends the process")
def test_groups_have_the_pools_timeout() -> None:
    assert "timed out" in run_ranks(timeout_of_a_new_group, 2)[0].lower()
