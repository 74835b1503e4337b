"""Copies of other ranks' shards: two versions, of which one is whole at any moment."""

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.progress import AbortedError
from dhp_ray.train.state.peer_replica import LATE_S, PeerReplica, _Exchange
from dhp_ray.train.state.shards import ShardState
from tests.ranks import run_processes, run_ranks
from tests.train.networks import Network, make_engine, train_step

CPU = torch.device("cpu")


def copied(state: ShardState) -> ShardState:
    copy = ShardState.zeros(state.value.numel(), CPU)
    copy.copy_(state)
    return copy


def equal(first: ShardState, second: ShardState) -> bool:
    counts = [(state.version, state.vision_updates) for state in (first, second)]
    return counts[0] == counts[1] and all(map(torch.equal, first.tensors().values(), second.tensors().values()))


def gathered(state: ShardState) -> list[ShardState]:
    """What every rank has, by the world's group."""
    mine = torch.stack(list(state.tensors().values()))
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [ShardState(*tensors.unbind(), state.version, state.vision_updates) for tensors in found]


def replicas(mirror: PeerReplica) -> dict[int, list[ShardState]]:
    """Complete replicas by owner, oldest first."""
    return {owner: buffers.complete() for owner, buffers in mirror._kept().items() if buffers.complete()}


def memory_bytes(mirror: PeerReplica) -> int:
    """Host memory of the replicas, and on a device the pinned memory that this rank's shard is sent from."""
    kept = [*mirror._replicas.values(), *([mirror._own] if mirror._own else [])]
    states = {id(state): state for buffers in kept for state in (buffers.front, buffers.back)}
    return sum(tensor.nbytes for state in states.values() for tensor in state.tensors().values())


def mirrored(rank: int, replica_ranks: list[int]) -> list[Any]:
    """Versions that are held, and whether each is what its owner had, through three updates."""
    world_size = len(replica_ranks)
    network = Network()
    engine = make_engine(network, rank, world_size)
    mirror = PeerReplica(engine, rank, replica_ranks, dist.new_group(list(range(world_size)), backend="gloo"))
    told: list[Any] = [(replicas(mirror), memory_bytes(mirror), engine.shard_size)]
    had: dict[int, list[ShardState]] = {}
    for step in range(4):
        if step:
            train_step(engine, network, step - 1, rank, world_size)
            engine.current.vision_updates = step // 2  # as if some had left it out
        had[engine.state_version] = gathered(engine.current)
        mirror.begin()
        during = {owner: [state.version for state in states] for owner, states in replicas(mirror).items()}
        mirror.finish()
        held = replicas(mirror)
        right = all(equal(state, had[state.version][owner]) for owner, states in held.items() for state in states)
        told.append((during, {owner: [state.version for state in states] for owner, states in held.items()}, right))
        pieces = {shard.owner: shard.pieces for shard in mirror.local_shards()}
        assert pieces == {owner: engine.layout.pieces(owner) for owner in held}
    mirror.close()
    return told


@pytest.mark.parametrize("replica_ranks", [[1, 0], [1, 2, 0], [2, 2, 0, 2]])
def test_a_replica_rank_has_two_versions_of_which_one_is_whole_at_any_moment(replica_ranks: list[int]) -> None:
    for rank, (before, *steps) in enumerate(run_ranks(mirrored, len(replica_ranks), replica_ranks)):
        owners = [owner for owner, replica_rank in enumerate(replica_ranks) if replica_rank == rank]
        held, memory_bytes, shard_size = before
        assert held == {}
        assert memory_bytes == len(owners) * 2 * 3 * 4 * shard_size
        assert steps == [({owner: old for owner in owners if old}, {owner: new for owner in owners}, True)
                         for old, new in (([], [0]), ([0], [0, 1]), ([1], [1, 2]), ([2], [2, 3]))]


def skipped_and_seldom(rank: int) -> list[Any]:
    """Mirrored at versions 0, 2 and 2 again, with a snapshot: this rank's own two versions are kept beside the
    engine's.
    """
    network = Network()
    engine = make_engine(network, rank, 2)
    mirror = PeerReplica(engine, rank, [1, 0], dist.new_group([0, 1], backend="gloo"), snapshot=True)
    mirror.begin()
    early = copied(engine.current)
    train_step(engine, network, 0, rank, 2)
    train_step(engine, network, 1, rank, 2)  # overwrites the engine's version 0, which is still on its way
    mirror.finish()
    first = {owner: [state.version for state in states] for owner, states in replicas(mirror).items()}
    mirror.begin()
    mirror.finish()
    own = replicas(mirror)[rank]
    right = equal(own[0], early) and equal(own[1],
                                           engine.current) and memory_bytes(mirror) == 2 * 2 * 3 * 4 * engine.shard_size
    mirror.begin()
    time.sleep(0.5)
    mirror.finish()
    # what an exchange took, and not until somebody asked
    right = right and len(mirror.seconds) == 3 and all(0 < seconds < 0.5 for seconds in mirror.seconds)
    return [first, right, {owner: [state.version for state in states] for owner, states in replicas(mirror).items()}]


def test_with_a_snapshot_updates_may_go_on_and_the_owner_has_what_was_mirrored() -> None:
    assert run_ranks(skipped_and_seldom, 2) == [[{0: [0], 1: [0]}, True, {0: [2], 1: [2]}]] * 2


def no_group(rank: int) -> list[Any]:
    engine = make_engine(Network(), 0, 1)
    mirror = PeerReplica(engine, 0, [], None)
    mirror.begin()
    mirror.finish()
    held = replicas(mirror), mirror.local_shards(), memory_bytes(mirror)
    mirror.close()
    return [held]


def test_one_rank_holds_no_replica() -> None:
    assert run_ranks(no_group, 1) == [[({}, [], 0)]]


def broken_off(rank: int, port: int, width: int, sends: bool, late_s: float) -> Any:
    """Rank 2 dies before it sends its version 2, or while that is on its way: what the others hold, and whether it is
    right. They begin `late_s` after it. gloo does not always end a receive from a peer that dies while it sends; the
    group's timeout then ends it, as in a run.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
    network = Network(width=width)
    engine = make_engine(network, rank, 3, bucket_bytes=10**7)
    group = dist.new_group([0, 1, 2], backend="gloo", timeout=timedelta(seconds=20))
    mirror = PeerReplica(engine, rank, [1, 0, 0], group)
    train_step(engine, network, 0, rank, 3)
    mirror.begin()
    mirror.finish()
    had = {1: gathered(engine.current)}
    train_step(engine, network, 1, rank, 3)
    had[2] = gathered(engine.current)
    if rank == 2:
        if sends:
            mirror.begin()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(late_s)
    said = ""
    try:
        mirror.begin()
        mirror.finish()
    except RuntimeError as error:
        said = str(error)
    held = replicas(mirror)
    versions = {owner: [state.version for state in states] for owner, states in held.items()}
    right = all(equal(state, had[state.version][owner]) for owner, states in held.items() for state in states)
    store.add("done", 1)
    while store.add("done", 0) < 2:  # a rank that is gone early would break off the other's exchange too
        time.sleep(0.01)
    return said, versions, right


@pytest.mark.gloo("the world's collectives are gloo's, and raise")
@pytest.mark.parametrize(("width", "sends", "late_s"), [
    (6, False, 0.0), (6, False, 0.5), pytest.param(1000, True, 0.0, marks=pytest.mark.slow)])
def test_a_peer_that_dies_before_all_has_come_leaves_its_older_version_whole(
    width: int, sends: bool, late_s: float
) -> None:
    """What is to be sent is 2 kB, or 64 MB, all of which may get away before its sender is gone. The others may find
    it gone already, when they begin."""
    (said, versions, right), (other_said, other_versions,
                              other_right) = run_processes(broken_off, 3, width, sends, late_s, mortal=[2])[:2]
    if not (sends and versions == {1: [1, 2], 2: [1, 2]}):
        assert said.startswith("mirror: rank 0's exchange broke off: ")
        assert "\n" not in said.strip()
        assert versions == {1: [1, 2], 2: [1]}, "the version of rank 2 that did not come whole does not count"
    assert right
    assert other_said == "", "its owner and its replica rank live"
    assert other_versions == {0: [1, 2]}
    assert other_right


def unanswered(rank: int) -> Any:
    """Rank 1's host is gone: nothing closes its sockets. What rank 0 holds once it has been told to abort."""
    network = Network()
    engine = make_engine(network, rank, 2)
    mirror = PeerReplica(engine, rank, [1, 0], dist.new_group([0, 1], backend="gloo"))
    train_step(engine, network, 0, rank, 2)
    mirror.begin()
    mirror.finish()
    train_step(engine, network, 1, rank, 2)
    if rank == 1:
        return dist.barrier()
    mirror.begin()
    threading.Timer(0.1, engine.progress.abort).start()
    begun = time.monotonic()
    with pytest.raises(AbortedError):
        mirror.finish()
    seconds = time.monotonic() - begun
    dist.barrier()
    return seconds, {owner: [state.version for state in states] for owner, states in replicas(mirror).items()}


@pytest.mark.gloo("an aborted rank's barrier would raise")
def test_an_abort_ends_the_wait_for_a_peer_that_does_not_answer() -> None:
    (seconds, versions), _ = run_ranks(unanswered, 2)
    assert LATE_S <= seconds < LATE_S + 3.0
    assert versions == {1: [1]}


def from_a_device(rank: int) -> list[Any]:
    """Every rank has an engine of its own on the one device; updates go on while a version is copied from it."""
    torch.cuda.set_device(0)
    network = Network(width=1500).cuda()
    engine = make_engine(network, 0, 1, bucket_bytes=10**7)
    mirror = PeerReplica(engine, rank, [1, 0], dist.new_group([0, 1], backend="gloo"), snapshot=True)
    right = []
    for step in range(3):
        engine.zero_gradients()
        for gradient in engine.gradients().values():
            gradient.fill_(rank + step + 1)
        engine.update(1)
        had = gathered(copied(engine.current))
        mirror.begin()
        mirror.finish()
        right += [equal(replicas(mirror)[owner][-1], had[owner]) for owner in range(2)]
    mirror.begin()
    for _ in range(2):  # overwrites what is on its way, on the device
        engine.update(1)
    mirror.finish()
    right += [equal(replicas(mirror)[owner][-1], had[owner]) for owner in range(2)]
    versions = {owner: [state.version for state in states] for owner, states in replicas(mirror).items()}
    return [all(right), versions, memory_bytes(mirror) == 4 * 3 * 4 * engine.shard_size]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_sends_from_pinned_memory() -> None:
    assert run_ranks(from_a_device, 2) == [[True, {0: [3], 1: [3]}, True]] * 2


class Arrived(dist.Work):
    """A receive that has gone through."""

    def wait(self, timeout: Any = None) -> bool:
        return True


@pytest.mark.parametrize(("error", "said"), [(ValueError("no such group\nat all"), "no such group"),
                                             (AssertionError(), "AssertionError")])
def test_what_has_arrived_counts_where_the_own_shard_cannot_be_sent(error: Exception, said: str) -> None:
    def send() -> list[dist.Work]:
        raise error

    exchange = _Exchange(0.0, {3: [Arrived()]}, send)
    exchange.start()
    exchange.join()
    assert (exchange.arrived, exchange.failure, exchange.sent.is_set()) == ([3], said, True)
