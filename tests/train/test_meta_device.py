"""A pack on the device `meta`, whose tensors have no numbers: what reads one raises, and every operator but the copy
of its inputs works on that device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.device_parts.reads import counted
from dhp_ray.comm.pack_communicator import PackCommunicator, Pending
from dhp_ray.model import attention, segment_attention
from dhp_ray.model.kernels import cuda
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.train.collate import PackInputs, collate, with_tiny_image
from dhp_ray.train.pack import pack_loss
from tests.packs import Film, make_pack, make_sample, own_payloads, rough_model

META = torch.device("meta")
SAMPLES = [make_sample("images", [50, (1, 4, 8), 70, (1, 18, 26), 9]),
           make_sample("film", [5, Film(0.5, ((2, 4, 4), (1, 4, 4))), 30]), make_sample("text", [61])]


class OneDevice(TorchDispatchMode):
    """Refuses operators that see tensors of two devices: on a real one they copy, and the host may wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
        assert len(devices) < 2, f"{func} works on {devices}"
        return result


class Silent(PackCommunicator):
    """Members that exchange nothing, as their tensors hold nothing."""

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int = 0
    ) -> Pending:
        for tensor, _ in (*sends, *receives):
            assert tensor.is_contiguous()
            assert tensor.device == META
        return Pending(self, [], [])


@pytest.fixture(scope="module")
def on_cpu() -> LanguageModel:
    return rough_model()


@pytest.fixture
def on_meta(on_cpu: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """In bf16, over the operators of CUDA: they have shapes for tensors without numbers."""
    for module in (attention, segment_attention):
        monkeypatch.setattr(module, "kernel_for", lambda device: cuda)
    adapter = rough_model()
    adapter.module.to(META)
    for parameter in adapter.module.parameters():
        parameter.data = parameter.data.bfloat16()
    return adapter


def without_reads(program: Callable[[], Any]) -> None:
    with OneDevice(), counted(META) as found:
        program()
    assert not found


def run(adapter: LanguageModel, inputs: PackInputs, ranks: tuple[int, ...], encodes: bool | None = None) -> None:
    link = Silent(ranks, ranks[inputs.member], cast(Any, object()))
    without_reads(lambda: pack_loss(adapter, inputs, link, encodes).backward())  # type: ignore[no-untyped-call]


QUICK = [(1, "", False), (1, "language", True), (2, "language", False), (2, "vision", True), (3, "vision", False),
         (3, "", True)]
"""Each degree and each frozen part, kept and recomputed."""


@pytest.mark.parametrize(("degree", "frozen", "recomputes"), [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in product((1, 2, 3), ("", "vision", "language"), (False, True))])
def test_a_pack_reads_nothing_of_its_device(
    degree: int, frozen: str, recomputes: bool, on_cpu: LanguageModel, on_meta: LanguageModel
) -> None:
    on_meta.freeze([frozen] if frozen else [])
    if recomputes:
        on_meta.set_activation_checkpointing()
    pack = make_pack(0, range(degree), [sample for sample, _ in SAMPLES])
    payloads = {sample.id: payload for sample, payload in SAMPLES}
    for rank in pack.ranks:
        inputs = collate(pack, own_payloads(pack, payloads, rank), rank, on_cpu)
        run(on_meta, inputs.map(lambda tensor: tensor.to(META)), pack.ranks)
    trained = [parameter for parameter in on_meta.module.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.device == META for parameter in trained)


def test_a_tiny_image_reads_nothing_of_its_device(on_cpu: LanguageModel, on_meta: LanguageModel) -> None:
    sample, payload = SAMPLES[2]
    inputs = collate(make_pack(0, [0], [sample]), {sample.id: payload}, 0, on_cpu)
    run(on_meta, with_tiny_image(inputs, on_cpu).map(lambda tensor: tensor.to(META)), (0,), encodes=True)


@pytest.mark.parametrize("read", [
    lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool(x.any()), lambda x: x.cpu(), lambda x: x.numpy(),
    lambda x: x[x > 1], lambda x: (x > 1).nonzero(), lambda x: x.repeat_interleave(x), lambda x: x.unique(),
    lambda x: x + torch.tensor([1, 2, 3], device=META), lambda x: x.index_select(0, torch.tensor([0])),
    lambda x: torch.zeros(3) + x,
])
def test_a_read_or_a_second_device_is_refused(read: Any) -> None:
    numbers = torch.empty(3, dtype=torch.int64, device=META)
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError, TypeError)):
        without_reads(lambda: read(numbers))
