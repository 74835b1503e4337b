"""What devices' sends and receives do and gloo's do not; as `test_conformance.py`, with the same sources."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from dhp_ray.comm.pack_communicator import PackCommunicator
from tests.async_backend.blocked import SILENT_S, Blocked
from tests.async_backend.rules import Backend, rule, run_group


def crossed_tags(rank: int, device: torch.device) -> list[float]:
    """Rank 0 sends 1, 2 with tags 7, 9; rank 1 receives with tags 9, 7."""
    tensors = [torch.full((1,), 1.0 + k if rank == 0 else 0.0, device=device) for k in range(2)]
    for tensor, tag in zip(tensors, (7, 9) if rank == 0 else (9, 7)):
        operation = dist.P2POp(dist.isend if rank == 0 else dist.irecv, tensor, 1 - rank, dist.group.WORLD, tag)
        for pending in dist.batch_isend_irecv([operation]):
            pending.wait()
    return [tensor.item() for tensor in tensors]


@rule("Tags are ignored: the k-th send to a peer is its k-th receive.",
      "torch.distributed, isend (tag is not supported with NCCL); pytorch#125079; NCCL, Point-to-point communication")
def test_tags_are_ignored(backend: Backend) -> None:
    assert run_group(crossed_tags, backend)[1] == [1.0, 2.0]


def behind_a_late_one(rank: int, device: torch.device) -> float:
    """Rank 0 receives from rank 1, which comes 2 s late, and then sends to rank 2: seconds until rank 2 has it."""
    tensors = [torch.zeros(1, device=device) for _ in range(2)]
    begin = time.monotonic()
    if rank == 1:
        time.sleep(2.0)
    messages = {0: [(dist.irecv, 1), (dist.isend, 2)], 1: [(dist.isend, 0)], 2: [(dist.irecv, 0)]}[rank]
    pending = [one for tensor, (call, peer) in zip(tensors, messages)
               for one in dist.batch_isend_irecv([dist.P2POp(call, tensor, peer, dist.group.WORLD)])]
    for one in pending:
        one.wait()
    tensors[0].item()
    return time.monotonic() - begin


@rule("A group is one queue: an operation waits for those that were called before it.",
      "ProcessGroupNCCL, ncclStreams_: one stream a communicator; CANN, HcclSend: synchronous")
def test_a_group_is_one_queue(backend: Backend) -> None:
    assert run_group(behind_a_late_one, backend, 3)[2] > 1.5


def tensors_of(rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sends and where it receives: more than a backend takes from a sender before the receiver has come.
    NCCL over sockets takes over 64 MB, from buffers of 4 MB a channel.
    """
    num_elements = 2**28 if dist.get_backend() == "nccl" else 2**24
    return torch.full((num_elements,), float(rank), device=device), torch.empty(num_elements, device=device)


def exchange_as_a_batch(rank: int, device: torch.device) -> float:
    sent, received = tensors_of(rank, device)
    link = PackCommunicator((0, 1), rank, dist.group.WORLD)
    link.exchange([(sent, 1 - rank)], [(received, 1 - rank)]).wait()
    return received[-1].item()


@rule("Sends and receives of one batch run beside one another.",
      "NCCL, Point-to-point communication: calls of one group never block each other")
def test_a_batch_runs_together(backend: Backend) -> None:
    assert run_group(exchange_as_a_batch, backend) == [1.0, 0.0]


def exchange_one_by_one(rank: int, device: torch.device) -> tuple[bool, str]:
    """Both ranks send, then receive: whether that ends, and what it raised."""
    sent, received = tensors_of(rank, device)

    def exchange() -> None:
        for pending in (dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)):
            pending.wait()  # type: ignore[union-attr]
        received[-1].item()

    blocked = Blocked(exchange, device)
    return blocked.ends_within(SILENT_S), str(blocked.result or "")


@rule("Sends and receives that are called one by one wait for one another.",
      "NCCL, Point-to-point communication: merge calls that need to progress concurrently to avoid deadlocks")
def test_single_messages_in_both_directions_block(backend: Backend) -> None:
    assert run_group(exchange_one_by_one, backend) == [(False, ""), (False, "")]
