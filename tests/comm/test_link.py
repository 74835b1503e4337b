import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.comm.progress import Progress, seconds_of
from tests.ranks import run_ranks


def everyone(rank: int, pack_index: int = 0, ranks: tuple[int, ...] | None = None) -> PackCommunicator:
    return PackCommunicator(ranks or tuple(range(dist.get_world_size())), rank, dist.group.WORLD, pack_index)


def pass_right(rank: int) -> list[tuple[float, ...]]:
    """Around the ring in the pack's order, which is not that of the ranks: 2 -> 0 -> 1 -> 2."""
    link = everyone(rank, ranks=(2, 0, 1))
    received = torch.empty(3)
    link.exchange([(torch.full((3,), float(rank)), (link.index + 1) % 3)], [(received, (link.index - 1) % 3)]).wait()
    return [tuple(received.tolist()), (link.size, link.index)]


def test_members_are_places_in_ring_order() -> None:
    assert run_ranks(pass_right, 3) == [[(2.0, 2.0, 2.0), (3, 1)], [(0.0, 0.0, 0.0), (3, 2)], [(1.0, 1.0, 1.0), (3, 0)]]


def uneven(rank: int) -> list[list[float]]:
    """Each sends `its rank` numbers to each: rank 0 has nothing to send, and need not be asked whether it has."""
    link = everyone(rank)
    link.exchange([(torch.zeros(0), 1)] if rank == 0 else [], []).wait()
    others = [member for member in range(3) if member != rank]
    received = {member: torch.zeros(member) for member in others}
    sends = [(torch.arange(rank) + 10.0 * rank, member) for member in others]
    link.exchange(sends, [(received[member], member) for member in others]).wait()
    return [received[member].tolist() for member in others]


def test_empty_tensors_are_not_sent() -> None:
    assert run_ranks(uneven, 3) == [[[10.0], [20.0, 21.0]], [[], [20.0, 21.0]], [[], [10.0]]]


def two_packs_at_once(rank: int) -> list[float]:
    """Sent in one order, received in another: packs, and kinds of message within one, are kept apart."""
    first, second = everyone(rank, 0), everyone(rank, 1)
    if rank == 0:
        sends = [link.exchange([(torch.tensor([value]), 1)], [], tag)
                 for link, tag, value in ((second, 1, 3.0), (second, 0, 2.0), (first, 0, 1.0))]
        for pending in sends:  # a send ends when the other side has posted its receive
            pending.wait()
        return []
    boxes = [torch.zeros(1) for _ in range(3)]
    for box, link, tag in zip(boxes, (first, second, second), (0, 0, 1)):
        link.exchange([], [(box, 0)], tag).wait()
    return [box.item() for box in boxes]


@pytest.mark.gloo("devices ignore tags")
def test_packs_and_tags_are_kept_apart() -> None:
    assert run_ranks(two_packs_at_once, 2) == [[], [1.0, 2.0, 3.0]]


def late_peer(rank: int) -> tuple[float, float]:
    """(seconds from posting to the end, seconds blocked) of an exchange that rank 1 enters a second late."""
    link, received = everyone(rank), torch.empty(1000)
    dist.barrier()
    time.sleep(1.0 if rank == 1 else 0.0)
    start_s = time.perf_counter()
    pending = link.exchange([(torch.ones(1000), 1 - rank)], [(received, 1 - rank)])
    time.sleep(0.3)  # computing while the exchange is under way
    with link.progress.timed_waits() as waits:
        pending.wait()
        total_s = time.perf_counter() - start_s
        pending.wait()
    return total_s, seconds_of(waits)


def test_a_late_peer_shows_as_blocked_time() -> None:
    (total_s, blocked_s), (_, blocked_of_late_s) = run_ranks(late_peer, 2)
    assert 0.4 < blocked_s < total_s - 0.25  # what it computed meanwhile is not blocked time
    assert blocked_of_late_s < blocked_s / 2


def test_a_pack_of_one_exchanges_nothing() -> None:
    link = PackCommunicator((3,), 3, None)
    link.exchange([], []).wait()
    assert (link.size, link.index, link.progress.passed().number) == (1, 0, 0)


def silent_peer(rank: int) -> str:
    """A peer that never answers ends the wait after the group's timeout, with torch's own error."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    link = PackCommunicator((0, 1), rank, group)
    if rank == 1:
        return ""
    pending = link.exchange([], [(torch.empty(4), 1)])
    try:
        pending.wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.gloo("a device raises nothing")
def test_a_silent_peer_times_out() -> None:
    assert "timed out" in run_ranks(silent_peer, 2)[0].lower()


@pytest.mark.gpu
def test_blocked_time_on_a_device_is_its_streams() -> None:
    progress = Progress(torch.device("cuda", 0))
    with progress.timed_waits() as waits, progress.waiting("exchange of a pack"):
        torch.cuda._sleep(200_000_000)
    assert 0.02 < seconds_of(waits) < 2.0
