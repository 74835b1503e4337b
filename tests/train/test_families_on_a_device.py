"""Every family's loss and gradients in bf16, on the CPU and on a device, beside fp32 on the CPU: what a device computes
is off by bf16's rounding, as the CPU is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.train.collate import collate
from dhp_ray.train.engine import COMPUTE_TYPES
from dhp_ray.train.flat_engine import FlatEngine
from dhp_ray.train.pack import pack_loss
from tests.packs import EXPERT_PRESETS, PRESETS, Film, make_pack, make_sample, rough_model
from tests.train.test_sharded_engine import settings

PARTS = {"images": [20, (1, 4, 8), 30, (1, 4, 4), 9], "film": [5, Film(0.5, ((2, 4, 4), (1, 4, 4))), 30], "text": [61]}
LARGEST_LOSS_ERROR = 5e-3
LARGEST_ERROR, WITH_EXPERTS = 0.06, 0.5
"""Of all gradients together, by their norm. Rounding chooses other experts where scores are close."""


@pytest.fixture(autouse=True)
def without_onednn() -> Iterator[None]:
    """Its bf16 kernels use instructions that end the process on some virtual machines."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    yield
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def computed(preset: str, device: torch.device, precision: str) -> tuple[float, Tensor]:
    """The loss of a pack, and all gradients in one row; layers run again in the backward pass, but for attention."""
    adapter = rough_model(preset=preset)
    adapter.set_activation_checkpointing(keeps_attention=True)
    engine = FlatEngine(adapter.module, settings(adapter), None, 1, 0, precision, device=device)
    engine.zero_gradients()
    made = [make_sample(name, parts, preset=preset) for name, parts in PARTS.items()]
    pack, payloads = make_pack(0, [0], [sample for sample, _ in made]), {sample.id: payload for sample, payload in made}
    inputs = collate(pack, payloads, 0, adapter, COMPUTE_TYPES[precision]).map(lambda tensor: tensor.to(device))
    loss = pack_loss(adapter, inputs, PackCommunicator((0,), 0, None))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), torch.cat([gradient.flatten().cpu() for gradient in engine.gradients().values()])


@pytest.mark.seconds
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("preset", PRESETS)
def test_bf16_is_off_by_its_rounding(preset: str, device: str) -> None:
    wanted_loss, wanted = computed(preset, torch.device("cpu"), "fp32")
    loss, found = computed(preset, torch.device(device), "bf16")
    assert abs(loss / wanted_loss - 1.0) < LARGEST_LOSS_ERROR
    assert (found - wanted).norm() < (WITH_EXPERTS if preset in EXPERT_PRESETS else LARGEST_ERROR) * wanted.norm()
