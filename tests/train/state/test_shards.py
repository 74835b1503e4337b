import math

import pytest

from dhp_ray.train.state.shards import PARAMETER_ALIGNMENT, SLICE_ALIGNMENT, FlatLayout

SHAPES = {"embed": (31, 6), "norm": (6,), "scale": (), "none": (0, 4), "head": (5, 31)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("bucket_elements", [1, 50, 333, 10_000])
def test_pieces_of_all_ranks_cover_every_parameter_once(world_size, bucket_elements):
    layout = FlatLayout(SHAPES, world_size, bucket_elements)
    owned = {name: [0] * math.prod(shape) for name, shape in SHAPES.items()}
    for rank in range(world_size):
        end = 0
        for piece in layout.pieces(rank):
            assert piece.offset >= end, "pieces are in the order of the shard and do not overlap"
            end = piece.shard.stop
            for element in range(piece.start, piece.stop):
                owned[piece.name][element] += 1
        assert end <= layout.shard_size
    assert all(count == 1 for counts in owned.values() for count in counts)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_elements", [1, 50, 10_000])
def test_a_piece_lies_where_the_collective_puts_it(world_size, bucket_elements):
    layout = FlatLayout(SHAPES, world_size, bucket_elements)
    shards: list[list[int]] = [[] for _ in range(world_size)]
    for bucket in layout.buckets:  # what reduce-scatter of the buffer 0, 1, 2, ... gives to each rank
        width = (bucket.stop - bucket.start) // world_size
        for rank in range(world_size):
            assert len(shards[rank]) == bucket.shard.start
            shards[rank] += range(bucket.start + rank * width, bucket.start + (rank + 1) * width)
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            start = layout.interval(piece.name).start
            assert shards[rank][piece.shard] == list(range(start + piece.start, start + piece.stop))


def test_buckets_are_cut_evenly_and_parameters_are_aligned():
    layout = FlatLayout({"a": (100,), "b": (65,)}, 3, 100)
    assert [(bucket.start, bucket.stop) for bucket in layout.buckets] == [(0, 120), (120, 240), (240, 264)]
    assert [bucket.shard for bucket in layout.buckets] == [slice(0, 40), slice(40, 80), slice(80, 88)]
    assert layout.shard_size == 88
    assert layout.interval("b") == slice(2 * PARAMETER_ALIGNMENT, 2 * PARAMETER_ALIGNMENT + 65)
    assert all((bucket.stop - bucket.start) % (3 * SLICE_ALIGNMENT) == 0 for bucket in layout.buckets)


def test_more_ranks_than_elements_leaves_some_without_a_piece():
    layout = FlatLayout({"a": (3,)}, 5, 1)
    assert layout.pieces(0)[0].stop == 3
    assert [len(layout.pieces(rank)) for rank in range(5)] == [1, 0, 0, 0, 0]
