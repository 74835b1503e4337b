"""State that moves from one membership to another: bit for bit, whatever the layouts."""

import math
import time
import zlib
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dhp_ray.train.state.reshard import reshard
from dhp_ray.train.state.shards import FlatLayout, LocalShard, Piece, ShardState
from tests.ranks import run_ranks

SHAPES = {"embed": (31, 6), "scale": (), "hidden": (13, 7), "bias": (3,), "empty": (0, 4), "head": (5, 64)}
KINDS = ("value", "exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")


def whole(kind: str, name: str) -> torch.Tensor:
    """Any bits at all, NaNs and denormals among them: they are to be moved, not understood."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode()))
    return torch.randint(-2**31, 2**31, (math.prod(SHAPES[name]),),
                         generator=generator).to(torch.int32).view(torch.float32)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


def rows_pieces(world_size: int, rank: int) -> tuple[Piece, ...]:
    """As FSDP cuts: rows of each parameter in equal chunks, the last ranks may own nothing of it."""
    found, offset = [], 0
    for name, shape in SHAPES.items():
        if not shape:
            continue  # it has no rows
        chunk, width = -(-shape[0] // world_size), math.prod(shape[1:])
        start, stop = min(chunk * rank, shape[0]) * width, min(chunk * (rank + 1), shape[0]) * width
        if start < stop:
            found.append(Piece(name, start, stop, offset))
            offset += stop - start
    return tuple(found)


def layout(mode: str, world_size: int, rank: int, bucket_elements: int) -> tuple[tuple[Piece, ...], int]:
    """Pieces of a rank and the size of its shard, in the layout of either engine."""
    shapes = {name: shape for name, shape in SHAPES.items() if shape}
    if mode == "micro_batch":
        pieces = rows_pieces(world_size, rank)
        return pieces, sum(piece.stop - piece.start for piece in pieces)
    flat = FlatLayout(shapes, world_size, bucket_elements)
    return flat.pieces(rank), flat.shard_size


def filled(pieces: tuple[Piece, ...], size: int, version: int) -> ShardState:
    state = ShardState.zeros(size, CPU)
    for kind, tensor in state.tensors().items():
        for piece in pieces:
            tensor[piece.shard] = whole(kind, piece.name)[piece.start : piece.stop]
    state.version, state.vision_updates = version, version - 4
    return state


def shard_of(mode: str, world_size: int, owner: int, version: int = 7, bucket_elements: int = 100) -> LocalShard:
    pieces, size = layout(mode, world_size, owner, bucket_elements)
    return LocalShard(owner, version, pieces, filled(pieces, size, version))


def same_bits(found: ShardState, expected: ShardState) -> bool:
    counts = [(state.version, state.vision_updates) for state in (found, expected)]
    return counts[0] == counts[1] and all(bits(found.tensors()[kind]) == bits(expected.tensors()[kind])
                                                     for kind in KINDS)


def moved(rank: int, new_size: int, cases: list[tuple[str, int, str]]) -> list[bool]:
    """For each case (old mode, old ranks, new mode), whether this rank's new shard is bit for bit what it should be."""
    found = []
    for old_mode, old_size, new_mode in cases:
        # some new ranks supply several, some nothing
        suppliers = [(owner * 2 + 1) % new_size for owner in range(old_size)]
        supplies = [shard_of(old_mode, old_size, owner) for owner in range(old_size) if suppliers[owner] == rank]
        wanted, size = layout(new_mode, new_size, rank, 64)
        state = reshard(supplies, wanted, size, rank, dist.group.WORLD)
        found.append(same_bits(state, filled(wanted, size, 7)))
    return found


CASES = [(old_mode, old_size, new_mode) for old_mode in ("step", "micro_batch") for new_mode in ("step", "micro_batch")
         for old_size in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("new_size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 5))])
def test_any_layout_of_any_number_of_ranks_becomes_any_other_bit_for_bit(new_size: int) -> None:
    assert run_ranks(moved, new_size, new_size, CASES) == [[True] * len(CASES)] * new_size


def test_one_rank_needs_no_group() -> None:
    wanted, size = layout("step", 1, 0, 1000)
    state = reshard([shard_of("micro_batch", 3, owner) for owner in range(3)], wanted, size, 0, None)
    assert same_bits(state, filled(wanted, size, 7))


def refused(rank: int, fault: str) -> str:
    supplies = [shard_of("step", 3, owner) for owner in ((0,), (), (2,))[rank]]
    if fault != "missing" and rank == 1:
        supplies = [shard_of("step", 3, 1, version=8 if fault == "version" else 7)]
    if fault == "twice" and rank == 2:
        supplies.append(shard_of("step", 3, 0))
    wanted, size = layout("step", 3, rank, 64)
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the test compares the text
        reshard(supplies, wanted, size, rank, dist.group.WORLD)
    dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize(("fault", "message"), [
    ("missing", "state: nobody supplies elements 72 to 80 of parameter embed"),
    ("version", "state: got versions 7 (old rank 2), 8 (old rank 1); allowed: one"),
    ("twice", "state: the shard of old rank 0 is supplied by ranks 0 and 2; allowed: one")])
def test_what_cannot_be_put_together_is_refused_on_every_rank_alike(fault: str, message: str) -> None:
    assert run_ranks(refused, 3, fault) == [message] * 3


def test_nothing_at_all_is_no_version() -> None:
    with pytest.raises(ValueError, match="state: got versions none; allowed: one"):
        reshard([], (), 0, 0, None)


@st.composite
def cut(draw: st.DrawFn) -> list[list[Piece]]:
    """All parameters cut anywhere and dealt to a few ranks in any order, with gaps between the pieces."""
    num_ranks = draw(st.integers(1, 4))
    dealt: list[list[Piece]] = [[] for _ in range(num_ranks)]
    ends = [0] * num_ranks
    for name in draw(st.permutations(list(SHAPES))):
        size = math.prod(SHAPES[name])
        edges = [0, *sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=4)) if size > 1 else []), size]
        for start, stop in pairwise(edges):
            rank = draw(st.integers(0, num_ranks - 1))
            offset = ends[rank] + draw(st.integers(0, 3))
            dealt[rank].append(Piece(name, start, stop, offset))
            ends[rank] = offset + stop - start
    return dealt


@settings(max_examples=60, deadline=None)
@given(old=cut(), new=cut(), gap=st.integers(0, 5))
def test_any_cut_becomes_any_other_and_what_no_piece_covers_is_zero(
    old: list[list[Piece]], new: list[list[Piece]], gap: int
) -> None:
    supplies = [LocalShard(owner, 3, tuple(pieces),
                           filled(tuple(pieces), max([piece.shard.stop for piece in pieces], default=0), 3))
                for owner, pieces in enumerate(old)]
    for wanted in new:
        size = max([piece.shard.stop for piece in wanted], default=0) + gap
        assert same_bits(reshard(supplies, wanted, size, 0, None), filled(tuple(wanted), size, 3))


def test_many_pieces_take_no_time() -> None:
    """Intersections are looked up: 40000 pieces against 40000 others would be 1.6e9 pairs."""
    number = 40000
    old = tuple(Piece("p", 3 * i, 3 * i + 3, 3 * (number - 1 - i)) for i in range(number))
    state = ShardState.zeros(3 * number, CPU)
    state.value.copy_(torch.arange(3 * number).view(-1, 3).flip(0).flatten())
    wanted = tuple(Piece("p", 4 * i, 4 * i + 4, 4 * i) for i in range(3 * number // 4))
    start = time.perf_counter()
    found = reshard([LocalShard(0, 0, old, state)], wanted, 3 * number, 0, None)
    assert time.perf_counter() - start < 20
    assert torch.equal(found.value, torch.arange(3 * number, dtype=torch.float32))


def test_a_shard_of_a_device_goes_to_host_memory() -> None:
    """Tensors without storage stand for a device that this machine lacks."""
    with FakeTensorMode():
        state = ShardState.zeros(8, torch.device("cuda"))
        state.version = 5
        parts: list[int] = []
        kept = LocalShard(1, 5, (), state).on_host(lambda: parts.append(1))
        assert len(parts) == 3, "one for each tensor at least: a worker that copies is seen to make progress"
        assert {tensor.device.type for tensor in kept.state.tensors().values()} == {"cpu"}
        assert (kept.owner, kept.version, kept.state.version) == (1, 5, 5)


def test_a_shard_in_host_memory_is_not_copied() -> None:
    shard = LocalShard(0, 1, (), ShardState.zeros(8, torch.device("cpu")))
    assert shard.on_host() is shard
