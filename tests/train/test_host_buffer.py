from __future__ import annotations

import pytest
import torch

from dhp_ray.train import activation_offload
from dhp_ray.train.activation_offload import HostBuffer


def test_pieces_lie_one_after_the_other_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "CHUNK_BYTES", 256)
    buffer = HostBuffer(pinned=False)
    taken = [buffer.take(num_bytes) for num_bytes in (100, 64, 500, 1)]
    assert [[len(piece) for piece in pieces] for pieces in taken] == [[100], [64], [64, 256, 180], [1]]
    for number, pieces in enumerate(taken):
        for piece in pieces:
            piece.fill_(number)
    assert all((piece == number).all() for number, pieces in enumerate(taken) for piece in pieces), "they overlap"
    assert all(piece.data_ptr() % 64 == 0 for pieces in taken for piece in pieces)
    assert buffer.num_bytes == 3 * 256


def test_what_is_cleared_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "CHUNK_BYTES", 256)
    buffer = HostBuffer(pinned=False)
    [first] = buffer.take(200)
    buffer.take(200)
    buffer.clear()
    assert [piece.data_ptr() for piece in buffer.take(200)] == [first.data_ptr()]
    assert buffer.num_bytes == 2 * 256, "chunks stay"


@pytest.mark.gpu
def test_a_device_copies_to_it_by_itself() -> None:
    assert all(piece.is_pinned() for piece in HostBuffer(pinned=True).take(activation_offload.CHUNK_BYTES + 1))
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= 2 * activation_offload.CHUNK_BYTES
