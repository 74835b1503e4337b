"""Memory that ranks of a node share: seen by all, locked by one, freed with the last."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.node_memory import NodeMemory, NodeMemoryError, _opened
from tests.ranks import run_ranks


def write_own_and_add(rank, world_size):
    memory = NodeMemory(8 * world_size, range(world_size), rank, dist.group.WORLD)
    parts = [part.view(torch.int64) for part in memory.parts]
    parts[rank].fill_(10 * rank)
    dist.barrier()
    seen = [int(part[0]) for part in parts]
    dist.barrier()
    for _ in range(200):
        for member, part in enumerate(parts):
            with memory.locked(member, 0):
                part[rank % world_size].add_(1)
                part[0 if rank else world_size - 1].add_(0)
                part[world_size - 1].add_(1)
    dist.barrier()
    found = [part.tolist() for part in parts]
    own = os.fstat(memory._files[memory.own])
    memory.close()
    return seen, found, own.st_nlink


def test_every_rank_reads_and_adds_to_every_part():
    for seen, found, links in run_ranks(write_own_and_add, 3, 3):
        assert seen == [0, 10, 20]
        for member, part in enumerate(found):
            assert part == [10 * member + 200, 10 * member + 200, 10 * member + 200 + 600]
        assert links == 0, "no file system has a name for it"


def die_with_the_lock(rank, world_size):
    memory = NodeMemory(64, range(world_size), rank, dist.group.WORLD)
    if rank:
        with memory.locked(0, 5):
            memory.parts[0][0] = 7
            dist.barrier()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    with memory.locked(0, 4):
        other = memory.parts[0][0].item()
    begun = time.monotonic()
    with memory.locked(0, 5):
        return other, time.monotonic() - begun, memory.parts[1].sum().item()


def test_the_lock_of_a_dead_rank_is_free_and_its_part_stays():
    from tests.ranks import run_processes

    results = run_processes(_in_small_world, 2, 2, timeout_s=60, mortal=(1,))
    other, waited_s, sum_of_dead = results[0]
    assert other == 7
    assert 0.05 < waited_s < 20
    assert sum_of_dead == 0


def _in_small_world(rank, port, world_size):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return die_with_the_lock(rank, world_size)


def test_one_rank_has_its_part_alone():
    memory = NodeMemory(100, [3], 3, None)
    assert [part.numel() for part in memory.parts] == [100]
    with memory.locked(0, 0):
        memory.parts[0].fill_(1)
    memory.close()
    assert memory.parts == []


def test_memory_of_another_container_is_refused():
    own = os.memfd_create("own")
    with pytest.raises(NodeMemoryError, match=r"^train.sharding=node: the memory of rank 4 cannot be opened at /proc/"
                                              r"\d+/fd/9999: .*; allowed here: train.sharding=whole$"):
        _opened(4, os.getpid(), 9999, 1)
    with pytest.raises(NodeMemoryError, match="is not the memory of rank 4, which runs in another container"):
        _opened(4, os.getpid(), own, os.fstat(own).st_ino + 1)
    os.close(own)


def test_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        memory = NodeMemory(1 << 20, [0], 0, None)
        memory.parts[0].fill_(1)
        memory.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as maps:
        assert "memfd:dhp_ray" not in maps.read()
