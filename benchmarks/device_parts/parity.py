"""A pack at degrees 1 to 4 on four ranks that share one device, against plain transformers on one rank in fp32: the
loss and all gradients.

On the CPU ranks compute in fp32. A device's attention has no fp32, so there they compute in bf16, from the same weights
(rounded to bf16 on both sides): how far degree 1 is from fp32 is what bf16 costs, and no degree may be further off.
Ranks exchange over the staged backend of tests/async_backend, or over NCCL (part `nccl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.device_parts.record import CheckError, Record
from benchmarks.device_parts.settings import Settings
from dhp_ray.comm.device import ACCELERATORS, Accelerator
from dhp_ray.comm.progress import Progress
from dhp_ray.comm.ranks import numbers_of_ranks
from dhp_ray.comm.transport import Transport
from dhp_ray.train.collate import collate
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.pack import pack_loss
from dhp_ray.train.state.optimizer import OptimizerSettings
from tests import async_backend
from tests.async_backend.shared_gpu import share_gpu
from tests.packs import make_pack, make_sample, own_payloads, plain_copy, plain_gradients, rough_model
from tests.ranks import run_processes

SAMPLES: list[list[Any]] = [[23, (1, 4, 8), 40, (1, 8, 6), 31], [57], [(2, 4, 6), 3], [7], [301, (1, 8, 8), 20]]
"""Text runs (their lengths) and images (their patches)."""
TRANSPORTS = ("pool", "parent")
LARGEST_ERROR = 1e-5
"""In fp32, of the loss and of each gradient to its largest element, as in tests/train/test_pack.py."""
BEYOND_DEGREE_1 = 1.5
"""How many times degree 1's error another degree may have in bf16: its partial sums are rounded elsewhere."""


class Degree(NamedTuple):
    """Relative errors: of the loss; of all gradients together, by their norm; of the worst one, to its largest element.
    """

    transport: str
    degree: int
    loss: float
    gradients: float
    worst: float
    worst_name: str


def run(settings: Settings, record: Record) -> str:
    precision = "fp32" if settings.device == "cpu" else "bf16"
    return compare(record, settings.device, async_backend.BACKEND, 4, precision, settings.limit_of("parity"))


def compare(record: Record, device: str, backend: str, num_ranks: int, precision: str, timeout_s: float) -> str:
    """Every degree up to `num_ranks` over both transports, one row each.

    Raises:
        CheckError: a degree is too far off.
    """
    rows: list[Degree] = run_processes(walk, num_ranks, num_ranks, device, backend, precision,
                                       timeout_s=timeout_s)[0]
    return written(record, rows, backend, precision)


def written(record: Record, rows: Sequence[Degree], backend: str, precision: str) -> str:
    """One row a degree. Raises CheckError."""
    record.table(["backend", "transport", "degree", "loss", "all gradients", "worst gradient", "which"])
    for row in rows:
        record.row(f"{backend}, {row.transport}, degree {row.degree}", row._asdict(),
                   [backend, row.transport, str(row.degree), f"{row.loss:.1e}", f"{row.gradients:.1e}",
                    f"{row.worst:.1e}", row.worst_name])
    alone = next(row for row in rows if row.degree == 1)
    wrong = [f"{row.transport}, degree {row.degree}" for row in rows if not holds(row, alone, precision)]
    if wrong:
        raise CheckError(f"gradients or loss are off at {'; '.join(wrong)}")
    most = max(row.degree for row in rows)
    return f"degrees 1 to {most} over {backend}: gradients within {max(row.gradients for row in rows):.1e}"


def holds(row: Degree, alone: Degree, precision: str) -> bool:
    if precision == "fp32":
        return row.loss < LARGEST_ERROR and row.worst < LARGEST_ERROR
    # bf16 keeps 8 bits: a loss that is off by less than one of them in the last place is not off
    return row.gradients <= BEYOND_DEGREE_1 * alone.gradients and row.loss <= max(2**-8, BEYOND_DEGREE_1 * alone.loss)


def walk(rank: int, port: int, num_ranks: int, device_name: str, backend: str, precision: str) -> list[Degree]:
    """Run by every rank of a world on one machine and one device."""
    async_backend.register()
    accelerator = replace(ACCELERATORS[device_name], backend=backend)
    if backend == "nccl":
        share_gpu(rank)  # all ranks take the first device
    accelerator.activate()
    accelerator.compute_in(precision)
    device, timeout = accelerator.torch_device(), timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout,
                            device_id=device if backend == "nccl" else None)
    return degrees(accelerator, precision, num_ranks)


def degrees(accelerator: Accelerator, precision: str, most: int) -> list[Degree]:
    """Errors of every degree up to `most`. Every rank of the world calls this; rank 0 compares."""
    device, rank, num_ranks = accelerator.torch_device(), dist.get_rank(), dist.get_world_size()
    adapter = rough_model()
    made = [make_sample(f"{number}", parts) for number, parts in enumerate(SAMPLES)]
    payloads = {sample.id: payload for sample, payload in made}
    wanted_loss, wanted = 0.0, dict[str, torch.Tensor]()
    if rank == 0:
        plain = plain_copy(adapter)
        if precision == "bf16":
            for parameter in plain.parameters():
                parameter.data = parameter.data.bfloat16().float()
        wanted_loss, wanted = plain_gradients(plain, list(payloads.values()))
    adapter.module.to(device)
    settings = OptimizerSettings(lambda name: 1e-3, adapter.decays, 0.0, (0.9, 0.95), 1e-6, 0.0)
    engine = FlatEngine(adapter.module, settings, None, 1, 0, precision)  # its gradients are summed over ranks below
    found, progress = [], Progress(device)
    for name in TRANSPORTS:
        transport = Transport(name, rank, num_ranks, accelerator, 16, timedelta(seconds=60), progress)
        transport.prepare([tuple(range(degree)) for degree in range(2, most + 1)])
        for degree in range(1, most + 1):
            pack = make_pack(degree, range(degree), [sample for sample, _ in made])
            engine.zero_gradients()
            total = torch.zeros((), dtype=torch.float32, device=device)
            if rank in pack.ranks:
                inputs = collate(pack, own_payloads(pack, payloads, rank), rank, adapter)
                inputs = inputs.map(lambda tensor: tensor.to(device))
                loss = pack_loss(adapter, inputs, transport.link(pack.ranks, pack.index))
                loss.backward()
                total += loss.detach()
            loss_sum = sum(numbers_of_ranks(total, dist.group.WORLD, progress))
            gradients = engine.gradients()
            for gradient in gradients.values():
                dist.all_reduce(gradient)
            progress.synchronize()
            if rank == 0:
                found.append(Degree(name, degree, abs(loss_sum / wanted_loss - 1.0), *errors(gradients, wanted)))
        transport.close()
    return found


def errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, float, str]:
    """`gradients`, `worst` and `worst_name` of a `Degree`."""
    differences = {name: found[name].cpu() - gradient for name, gradient in wanted.items()}
    norm = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    off = torch.stack([difference.norm() for difference in differences.values()]).norm()
    each = {name: (difference.abs().max() / (wanted[name].abs().max() or 1.0)).item()
            for name, difference in differences.items()}
    worst = max(each, key=each.__getitem__)
    return (off / norm).item(), each[worst], worst
