"""Memory that the state of a model takes on a rank, as the engines predict it before they are built."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dhp_ray.comm.ranks import own_rank
from dhp_ray.model.build import build_model
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.train.sharded_engine import ShardedEngine
from tests.engine_values import resident_bytes
from tests.train.networks import make_engine, run_tensors
from tests.train.test_loading_flat import CPU, flat_engine, saved
from tests.train.test_sharded_engine import settings


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage that an operation under it has made and that is still there; `peak_bytes` is
    the most that there were after any operation.
    """

    def __init__(self):
        super().__init__()
        self.storages = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = (leaf.to_local() if isinstance(leaf, DTensor) else leaf).untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self.live()))
        return result

    def live(self):
        return [storage for reference in self.storages.values() if (storage := reference()) is not None]

    def num_bytes(self, without=()):
        """Of all but the storages of some tensors."""
        gc.collect()
        left_out = {tensor.untyped_storage().data_ptr() for tensor in without}
        return sum(storage.nbytes() for storage in self.live() if storage.data_ptr() not in left_out)


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


def construction_bytes(rank, world_size, sync, precision, freeze, path):
    """The peak while an engine is made from a model folder, and what is predicted that it holds."""
    adapter = build_model("", path, None, 0)
    adapter.freeze(freeze)
    parameters = [(parameter.numel(), parameter.requires_grad) for parameter in adapter.module.parameters()]
    num_parameters = sum(size for size, _ in parameters)
    num_frozen = sum(size for size, trained in parameters if not trained)
    with LiveStorages() as live:
        if sync == "step":
            flat_engine(adapter, rank, world_size, precision)
            return live.peak_bytes, resident_bytes(num_parameters, world_size, precision, num_frozen)
        ShardedEngine(adapter, settings(adapter), dist.group.WORLD, rank, CPU, precision)
        resident = MemoryModel(adapter.shape, MemorySettings(
            sync=sync, world_size=world_size, precision=precision, recomputes=False, frozen=tuple(freeze))).resident()
        # gradients are there from the first backward on
        return live.peak_bytes, sum(resident.values()) - resident["gradients"]


@pytest.mark.parametrize(("world_size", "sync", "precision", "freeze"), [
    (1, "step", "fp32", []), (2, "step", "bf16", ["language"]), (3, "micro_batch", "bf16", ["vision"]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (1, "step", "bf16", ["vision"]), (3, "step", "bf16", []), (1, "micro_batch", "fp32", []))),
])
def test_the_peak_at_construction_is_what_is_resident(world_size, sync, precision, freeze, tmp_path):
    path = saved(tmp_path / "model", torch.bfloat16, tie=True)
    for peak, resident in run_tensors(construction_bytes, world_size, world_size, sync, precision, freeze, path):
        assert 0.98 * resident < peak < 1.02 * resident


def bytes_after_re_forming(rank, world_size, precision):
    """Two engines after each other over one module, each with a step: bytes that live while the second one's state is
    loaded, without the shards that the first one left, which a worker keeps in host memory.
    """
    with LiveStorages() as live:
        network = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
        found = []
        shards = []
        for number in range(2):
            engine = make_engine(network, rank, world_size, 10**5, precision)
            if shards:
                engine.load_state(shards[0].state)
            else:
                engine.zero_gradients()
                network(torch.ones(3, 256, dtype=engine.compute_type)).sum().backward()
                engine.update(3)
            kept = [tensor for shard in shards for tensor in shard.state.tensors().values()]
            found.append(live.num_bytes(without=kept))
            if number == 0:
                shards = engine.local_shards(own_rank() if world_size > 1 else 0)
                engine.release()
                del engine
        return found


@pytest.mark.parametrize(("world_size", "precision"), [(1, "fp32"), (1, "bf16"), (3, "bf16")])
def test_re_forming_leaves_nothing_of_the_engine_before(world_size, precision):
    for found in run_tensors(bytes_after_re_forming, world_size, world_size, precision):
        for held in found:
            assert held == pytest.approx(resident_bytes(2 * 256 * 512 + 256 + 512, world_size, precision), rel=0.02)
