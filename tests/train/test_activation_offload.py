"""What is moved to host memory comes back as it was, in time, and nothing else changes: losses and gradients are equal
bit by bit.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp_ray.train.activation_offload import Moved, PackOffload
from dhp_ray.train.collate import collate
from dhp_ray.train.pack import pack_loss
from tests.one_rank import link_of_one_rank
from tests.packs import PATCH_DIMS, TEXT_PRESETS, make_pack, make_sample, rough_model
from tests.train.late_copies import LateCopies

HOST = torch.device("cpu")
PARTS: dict[str, list[Any]] = {"long": [150], "images": [9, (1, 4, 6), 40, (1, 8, 6), 5], "picture": [(1, 8, 8), 12]}


@contextmanager
def pack_of(preset: str = "tiny", recomputes: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """A model, the inputs of a pack with images, and the link of its one rank."""
    adapter = rough_model(preset=preset)
    adapter.set_activation_checkpointing(recomputes)
    made = [make_sample(name, parts, preset=preset) for name, parts in PARTS.items()]
    payloads = {sample.id: payload for sample, payload in made}
    pack = make_pack(0, [0], [sample for sample, _ in made])
    yield adapter, collate(pack, payloads, 0, adapter), link_of_one_rank()


def passes(adapter: Any, inputs: Any, link: Any, offload: PackOffload) -> dict[str, Tensor]:
    """The gradients of a pack."""
    adapter.module.zero_grad()
    with offload.of_pack(inputs):
        loss = pack_loss(adapter, inputs, link)
    offload.backward(loss)
    return {name: parameter.grad.clone() for name, parameter in adapter.module.named_parameters()}


@pytest.mark.parametrize("preset", [*PATCH_DIMS, TEXT_PRESETS[0]])
@pytest.mark.parametrize("recomputes", [False, True])
def test_copies_that_end_as_late_as_they_may_give_the_same_bits(preset: str, recomputes: bool) -> None:
    """A stream that copies nothing before compute waits for it: whoever does not wait finds garbage."""
    with pack_of(preset, recomputes) as (adapter, inputs, link):
        wanted = passes(adapter, inputs, link, PackOffload(adapter, HOST))
        for share in (0.3, 1.0):
            offload = PackOffload(adapter, HOST)
            offload._copies = LateCopies()
            found = passes(adapter, replace(inputs, offload=share), link, offload)
            assert offload.moved_bytes > 0
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_nothing_is_left_when_a_pack_is_done() -> None:
    """Freed as the backward pass goes on, not by the garbage collector."""
    gc.collect()
    with pack_of() as (adapter, inputs, link):
        offload = PackOffload(adapter, HOST)
        gc.disable()
        try:
            for share in (1.0, 0.5):
                passes(adapter, replace(inputs, offload=share), link, offload)
                assert not [thing for thing in gc.get_objects() if type(thing) is Moved]
        finally:
            gc.enable()
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in adapter.module.modules())
        assert hooks == 0


def test_a_pack_that_fails_leaves_nothing_behind() -> None:
    with pack_of() as (adapter, inputs, link):
        offload, wanted = PackOffload(adapter, HOST), passes(adapter, inputs, link, PackOffload(adapter, HOST))
        language = adapter.language.layers
        for layer in (language[0], language[1].mlp):
            handle = layer.register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="lost a peer"):
                passes(adapter, replace(inputs, offload=1.0), link, offload)
            handle.remove()
        y = torch.ones(3, requires_grad=True).exp()
        assert y.grad_fn._saved_result.data_ptr() == y.data_ptr(), "hooks are still in force"  # type: ignore[union-attr]
        found = passes(adapter, replace(inputs, offload=0.5), link, offload)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_backward_pass_that_fails_ends_copies_before_it_lets_go_what_they_write_to() -> None:
    with pack_of() as (adapter, inputs, link):
        offload, copies, behind = PackOffload(adapter, HOST), LateCopies(), list[int]()
        offload._copies = copies

        def fail_backward(layer: torch.nn.Module, inputs: Any, outputs: Tensor) -> None:
            def note_and_fail(gradient: Tensor) -> None:
                behind.append(copies.num_behind)
                fail()

            outputs.register_hook(note_and_fail)

        handle = adapter.language.layers[0].register_forward_hook(fail_backward)
        with pytest.raises(RuntimeError, match="lost a peer"):
            passes(adapter, replace(inputs, offload=1.0), link, offload)
        handle.remove()
        assert behind[0] > 0
        assert copies.num_behind == 0


def fail(*_: Any) -> None:
    raise RuntimeError("lost a peer")
