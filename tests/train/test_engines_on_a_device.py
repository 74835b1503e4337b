"""Steps of every engine on CUDA, by ranks that share a GPU: the losses, norms and parameters of one rank that has
everything. FSDP2 runs over NCCL alone (tests/comm/test_async_backend.py).
"""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dhp_ray.comm.device import CUDA, Accelerator
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.transport import Transport
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.rank_step import MicroBatchStep, RankStep
from dhp_ray.train.sharded_engine import ShardedEngine
from dhp_ray.train.step_inputs import collated
from tests import async_backend
from tests.async_backend.shared_gpu import share_gpu
from tests.engine_values import full_parameters
from tests.packs import rough_model
from tests.ranks import run_processes
from tests.train.test_sharded_engine import Groups, make_plan, payloads_of, settings

STEPS = 2
PACKS: list[Groups] = [[([0, 1], [[5, (1, 4, 4), 60]], None), ([2], [[9]], None)],
                       [([0], [[3, (1, 4, 8), (1, 4, 4), 4]], None), ([1, 2], [[400], [7, (1, 8, 4), 9]], None)]]
TIMEOUT = timedelta(seconds=60)


def own_engine(adapter: LanguageModel, sync: str, rank: int, world: dist.ProcessGroup | None, world_size: int,
               accelerator: Accelerator, progress: Progress) -> Any:
    rule, device = settings(adapter), accelerator.torch_device()
    if sync == "micro_batch":
        assert world is not None
        return ShardedEngine(adapter, rule, world, rank, device, "bf16", progress=progress)
    adapter.module.to(device)
    return FlatEngine(adapter.module, rule, world, world_size, rank, "bf16", 4000, progress=progress)


def train(rank: int, port: int, world_size: int, backend: str, sync: str, recomputes: bool) -> bytes:
    """Losses and gradient norms by step, and on rank 0 all parameters."""
    async_backend.register()
    if backend == "nccl":
        share_gpu(rank)
    accelerator = replace(CUDA, backend=backend)
    accelerator.activate()
    device, progress = accelerator.torch_device(), Progress(accelerator.torch_device())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT,
                            device_id=device if backend == "nccl" else None)
    world = dist.group.WORLD if world_size > 1 else None
    adapter = rough_model()
    adapter.set_activation_checkpointing(recomputes)
    engine = own_engine(adapter, sync, rank, world, world_size, accelerator, progress)
    transport = Transport("pool", rank, world_size, accelerator, 16, TIMEOUT, progress)
    kind = MicroBatchStep if sync == "micro_batch" else RankStep
    step = kind(adapter, engine, transport, world, device)
    layout = PACKS if world_size > 1 else [[([0], samples, None)] for groups in PACKS for _, samples, _ in groups]
    plan, payloads = make_plan(world_size, layout, sync=sync)
    losses, norms = [], []
    for number in range(STEPS):
        rank_plan = plan.rank_plan(number + 1, rank)
        inputs = collated(rank_plan, payloads_of(rank_plan.packs, payloads, rank), adapter, "bf16", pinned=True)
        result = step.run(inputs, 1.0)
        losses.append(result.loss_sum)
        norms.append(result.gradient_norm)
    found = {name: value.cpu() for name, value in full_parameters(engine).items()}
    saved = io.BytesIO()
    torch.save((losses, norms, found), saved)
    transport.close()
    engine.release()
    dist.barrier()
    return saved.getvalue()


def results(num_ranks: int, *arguments: Any) -> list[Any]:
    return [torch.load(io.BytesIO(saved), weights_only=False)
            for saved in run_processes(train, num_ranks, num_ranks, *arguments)]


@pytest.fixture(scope="module")
def of_one_rank() -> Any:
    return results(1, async_backend.BACKEND, "step", False)[0]


@pytest.mark.gpu
@pytest.mark.gloo("its backends are its own")
@pytest.mark.parametrize(("backend", "sync", "recomputes"), [
    (async_backend.BACKEND, "step", False), (async_backend.BACKEND, "step", True), ("nccl", "step", False),
    ("nccl", "micro_batch", True)])
def test_ranks_train_as_one_does(backend: str, sync: str, recomputes: bool, of_one_rank: Any) -> None:
    expected_losses, expected_norms, expected = of_one_rank
    before = {name: parameter.detach().cpu() for name, parameter in rough_model().module.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for losses, norms, parameters in results(3, backend, sync, recomputes):
        assert losses == pytest.approx(expected_losses, rel=2e-3)
        assert norms == pytest.approx(expected_norms, rel=2e-2)
        found |= parameters
    off, moved = (torch.stack([(found[name] - other[name]).norm() for name in expected]).norm()
                  for other in (expected, before))
    assert off < 0.1 * moved
