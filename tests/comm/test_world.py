"""Worlds that do not come about, and those after them."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from threading import Timer
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm import world
from dhp_ray.comm.device import CPU, Accelerator
from dhp_ray.comm.transport import Transport
from dhp_ray.comm.world import (
    RendezvousError,
    close_store_connections,
    destroy_world,
    init_world,
    is_peer_loss,
    make_group,
    meet,
    open_store,
)
from tests.ranks import run_processes

TIMEOUT = timedelta(seconds=20)


def after_failed_attempts(rank: int, port: int) -> float:
    """Rank 0 has tried to enter worlds whose other rank never came; rank 1 is new."""
    store = open_store("127.0.0.1", port, TIMEOUT)
    for generation in range(3 if rank == 0 else 0):
        with pytest.raises(RuntimeError):
            init_world(store, generation, 0, 2, CPU, timedelta(seconds=0.5))
        destroy_world(lambda: None, CPU, broken=True)
    init_world(store, 3, rank, 2, CPU, TIMEOUT)
    total = torch.ones(1)
    dist.all_reduce(total, group=make_group([0, 1], "gloo", TIMEOUT))
    return total.item()


def test_an_attempt_that_failed_keeps_nobody_from_the_next_world() -> None:
    assert run_processes(after_failed_attempts, 2) == [2.0, 2.0]


def without_the_third(rank: int, port: int) -> float:
    """A world whose device is bound to its group, as torch does for NCCL; ranks 0 and 1 make a group, rank 2 is not
    asked to come.
    """
    made = dist.init_process_group

    def bound(*arguments: Any, device_id: torch.device | None = None, **options: Any) -> None:
        made(*arguments, **options)
        cast(Any, dist.group.WORLD).bound_device_id = device_id

    dist.init_process_group = bound
    store = open_store("127.0.0.1", port, TIMEOUT)
    init_world(store, 1, rank, 3, Accelerator("cuda", "gloo", None), TIMEOUT)
    if rank == 2:
        store.wait(["done"])
        make_group([0, 1], "gloo", TIMEOUT)
        return 0.0
    total = torch.ones(1)
    dist.all_reduce(total, group=make_group([0, 1], "gloo", TIMEOUT))
    store.set("done", "1")
    return total.item()


@pytest.mark.gloo("the world is made as for NCCL")
def test_a_group_is_made_by_its_members_alone() -> None:
    assert run_processes(without_the_third, 3) == [2.0, 2.0, 0.0]


def late_for_a_group(rank: int, port: int, late_s: float, connect_s: float) -> float:
    """Rank 1 comes late to a group."""
    world.CONNECT_TIMEOUT = timedelta(seconds=connect_s)
    init_world(open_store("127.0.0.1", port, TIMEOUT), 1, rank, 2, CPU, TIMEOUT)
    if rank == 1:
        time.sleep(late_s)
    total = torch.ones(1)
    dist.all_reduce(total, group=make_group([0, 1], "gloo", TIMEOUT))
    return total.item()


@pytest.mark.parametrize(("late_s", "connect_s"), [(5.0, 3.0), pytest.param(13.0, 10.0, marks=pytest.mark.slow)])
def test_a_late_rank_is_waited_for_as_long_as_a_collective_may_take(late_s: float, connect_s: float) -> None:
    assert run_processes(late_for_a_group, 2, late_s, connect_s) == [2.0, 2.0]


def closed_connections(_: int, port: int) -> list[bool]:
    """Whether a store's connection is gone after it is closed, with and without the links of /proc (macOS)."""
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for absent in (False, True):
            store = open_store("127.0.0.1", port, TIMEOUT)
            if absent:
                patch.setattr("os.path.isdir", lambda path: False)
                patch.setattr("os.readlink", None)
            close_store_connections("127.0.0.1", port)
            with pytest.raises(dist.DistError):
                store.check(["done"])
            found.append(absent)
        return found


def test_connections_are_closed_without_proc_too() -> None:
    assert run_processes(closed_connections, 1) == [[False, True]]


def never_comes(rank: int, port: int) -> list[str]:
    """Rank 1 makes neither of two groups. What rank 0 is told of the first; for the second it is let go."""
    store = open_store("127.0.0.1", port, TIMEOUT)
    init_world(store, 1, rank, 2, CPU, TIMEOUT)
    if rank == 1:
        store.wait(["done"])
        return []
    other = open_store("127.0.0.1", port, TIMEOUT)
    with pytest.raises(RendezvousError) as first:
        make_group([0, 1], "gloo", timedelta(seconds=0.5))
    Timer(0.5, close_store_connections, ("127.0.0.1", port)).start()
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as second:
        make_group([0, 1], "gloo", timedelta(seconds=50))
    took_s = time.monotonic() - begun
    assert is_peer_loss(first.value)
    assert is_peer_loss(second.value)
    with pytest.raises(dist.DistError):
        other.check(["done"])  # every connection of this process is gone
    open_store("127.0.0.1", port, TIMEOUT).set("done", "1")  # a later generation's is not
    assert took_s < 20, took_s
    return [str(first.value)]


def test_whoever_waits_for_a_rank_that_never_comes_can_be_let_go() -> None:
    assert run_processes(never_comes, 2)[0] == ["process group (0, 1): ranks [1] did not come within 0.5 s"]


def keys_of_generations(rank: int, port: int) -> list[list[str]]:
    """The store's keys in two generations: as their ranks have met, and after 40 groups of either kind."""
    store, found = open_store("127.0.0.1", port, TIMEOUT), []
    members = [(0, 1), (2, 3), (1, 2), (0, 3), (0, 1, 2), (0, 1, 2, 3)]
    for generation in (1, 7):
        init_world(store, generation, rank, 4, CPU, TIMEOUT)
        dist.barrier()
        found.append(sorted(store.list_keys()))
        dist.barrier()
        transport = Transport("pool", rank, 4, CPU, 3, TIMEOUT)
        for number in range(40):
            transport.prepare([members[number % len(members)]])
        for number in range(40):
            group = make_group(members[number % len(members)], "gloo", TIMEOUT)
            dist.barrier()  # who leaves while others connect breaks their connections
            if rank in members[number % len(members)]:
                dist.destroy_process_group(group)
        assert transport.counters()["evictions"] == 37
        dist.barrier()
        found.append(sorted(store.list_keys()))
        dist.barrier()
        destroy_world(transport.close, CPU, broken=False)
    return found


def test_groups_and_generations_leave_no_keys_in_the_store() -> None:
    """A run of weeks makes millions of groups."""
    for first, after_first, second, after_second in run_processes(keys_of_generations, 4):
        assert first
        assert after_first == first
        assert after_second == second
        assert all(key.startswith("generation-7/") for key in second), "no rank is in the first any more"


def largest_value(rank: int, port: int, world_size: int) -> int:
    store = open_store("127.0.0.1", port, TIMEOUT)
    init_world(store, 1, rank, world_size, CPU, TIMEOUT)
    values = [len(store.get(key)) for key in store.list_keys() if "//" in key]
    assert len(values) >= world_size
    dist.barrier()
    return max(values)


@pytest.mark.gloo("of gloo's own keys")
def test_what_a_member_stores_does_not_grow_with_the_members() -> None:
    """Each of N members reads N values through the one store."""
    assert len({size for num_ranks in (2, 5) for size in run_processes(largest_value, num_ranks, num_ranks)}) == 1


class CountingStore:
    """A store that counts what it is asked."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)


def calls_of_a_meeting(rank: int, port: int) -> int:
    store = CountingStore(open_store("127.0.0.1", port, TIMEOUT))
    time.sleep(1.5 if rank == 0 else 0.0)
    meet(store, "generation-1", "generation 1", rank, range(3), TIMEOUT)  # type: ignore[arg-type]
    return store.calls


def test_ranks_that_wait_for_one_another_hardly_ask() -> None:
    assert max(run_processes(calls_of_a_meeting, 3)) <= 6


def absent_ranks(rank: int, port: int) -> str:
    store = open_store("127.0.0.1", port, TIMEOUT)
    with pytest.raises(RendezvousError) as error:
        meet(store, "generation-1", "generation 1", 2 * rank, range(4), timedelta(seconds=0.5))
    return str(error.value)


def test_ranks_that_do_not_come_are_named() -> None:
    assert "generation 1: ranks [1, 3] did not come within 0.5 s" in run_processes(absent_ranks, 2)


def keys_of_lazy_groups(rank: int, port: int) -> float:
    """Where the environment lets gloo connect at the first operation, which reads keys."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    init_world(open_store("127.0.0.1", port, TIMEOUT), 1, rank, 3, CPU, TIMEOUT)
    total = torch.ones(1)
    dist.all_reduce(total, group=make_group([0, 1, 2], "gloo", TIMEOUT))
    return total.item()


def test_keys_are_there_as_long_as_they_are_read() -> None:
    assert run_processes(keys_of_lazy_groups, 3) == [3.0] * 3
