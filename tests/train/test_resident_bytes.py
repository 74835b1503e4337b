"""Memory that the state of a model takes on a rank, as the engines predict it before they are built."""

import pytest
from torch import nn

from dhp_ray.train.flat_engine import resident_bytes
from dhp_ray.train.sharded_engine import sharded_bytes
from tests.train.networks import make_engine, run_tensors


def held_bytes(engine):
    """Bytes of all buffers of an engine, each counted once."""
    tensors = [*engine.module.parameters(), *engine.gradients().values(), engine._shard_gradient,
               *engine.current.tensors().values(), *engine.spare.tensors().values()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def large_engine_bytes(rank, world_size, precision):
    network = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    return held_bytes(make_engine(network, rank, world_size, 10**5, precision))


@pytest.mark.parametrize(("world_size", "precision"), [(1, "fp32"), (1, "bf16"), (3, "fp32"), (3, "bf16")])
def test_resident_bytes_are_what_an_engine_holds(world_size, precision):
    for held in run_tensors(large_engine_bytes, world_size, world_size, precision):
        assert held == pytest.approx(resident_bytes(2 * 256 * 512 + 256 + 512, world_size, precision), rel=0.01)


def test_resident_bytes_of_frozen_parameters_are_those_of_computing():
    assert resident_bytes(100, 1, "fp32") == 100 * (4 + 4 + 24)
    assert resident_bytes(100, 4, "bf16") == 100 * (2 + 4) + 25 * 28
    assert resident_bytes(100, 4, "bf16", num_frozen=60) == 200 + 160 + 10 * 28


def test_sharded_bytes_count_rows_gradients_and_two_versions() -> None:
    assert sharded_bytes(100, 1) == 100 * (4 + 4 + 24)
    assert sharded_bytes(100, 4, num_frozen=60) == 25 * 4 + 10 * 28
