"""Memory that ranks of a node share: seen by all, locked by one, freed with the last."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm import host_node_memory
from dhp_ray.comm.host_node_memory import _opened
from dhp_ray.comm.node_memory import NodeMemory, NodeMemoryError, share_memory
from tests.ranks import run_ranks


def memory_of(num_bytes, ranks, rank, group) -> NodeMemory:
    return share_memory(torch.device("cpu"), num_bytes, ranks, rank, group)


def write_own_and_add(rank, world_size):
    memory = memory_of(8 * world_size, range(world_size), rank, dist.group.WORLD)
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
    memory = memory_of(64, range(world_size), rank, dist.group.WORLD)
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
    memory = memory_of(100, [3], 3, None)
    assert [part.numel() for part in memory.parts] == [100]
    with memory.locked(0, 0):
        memory.parts[0].fill_(1)
    memory.close()
    assert memory.parts == []


def test_rows_are_added_where_they_are():
    memory = memory_of(24, [0], 0, None)
    table = memory.parts[0].view(torch.float32).view(3, 2)
    memory.add_rows(table, torch.tensor([1, -1, 1, 3, 2]), torch.arange(10.0).view(5, 2).bfloat16())
    memory.add(table[0], torch.tensor([0.5, 1.5]).bfloat16())
    assert table.tolist() == [[0.5, 1.5], [4.0, 6.0], [8.0, 9.0]]
    del table
    memory.close()


def test_memory_of_another_container_is_not_opened():
    own = os.memfd_create("own")
    found = os.fstat(own)
    assert _opened(4, os.getpid(), 9999, [1, 1]) == (
        -1, f"the memory of rank 4 cannot be opened at /proc/{os.getpid()}/fd/9999: No such file or directory")
    assert _opened(4, os.getpid(), own, [found.st_dev, found.st_ino + 1]) == (
        -1, f"/proc/{os.getpid()}/fd/{own} is not the memory of rank 4, which runs in another container")
    file, said = _opened(4, os.getpid(), own, [found.st_dev, found.st_ino])
    assert os.fstat(file).st_ino == found.st_ino
    assert said == ""
    os.close(own)
    os.close(file)


def refuse(rank, world_size):
    if rank == 1:  # as where it may not look into the other
        host_node_memory._opened = lambda *described: (-1, "the memory of rank 0 cannot be opened")
    with pytest.raises(NodeMemoryError) as caught:
        memory_of(64, range(world_size), rank, dist.group.WORLD)
    return str(caught.value)


def test_a_refusal_is_said_on_all_ranks():
    assert run_ranks(refuse, 2, 2) == [
        "train.sharding=node: a rank cannot open the memory of another; allowed here: train.sharding=whole",
        "train.sharding=node: the memory of rank 0 cannot be opened; allowed here: train.sharding=whole"]


def test_no_room_is_one_line():
    with pytest.raises(NodeMemoryError, match=r"^train.sharding=node: [\d,]+ bytes of shared memory cannot be had: "):
        memory_of(1 << 62, [0], 0, None)


def test_nothing_is_left_open():
    def left():
        gc.collect()  # of tests before
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:dhp_ray")

    before = left()
    for _ in range(20):
        memory = memory_of(1 << 20, [0], 0, None)
        memory.parts[0].fill_(1)
        memory.close()
    assert left() == before


@pytest.mark.gloo("starts no ranks")
def test_a_system_without_files_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(NodeMemoryError, match="only Linux has files in memory"):
        host_node_memory._created(4096)
