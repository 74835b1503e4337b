"""Layers that are recomputed, with and without the results of attention: the same bits, and less to compute."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp_ray.comm.device import choose
from dhp_ray.comm.pack_communicator import PackCommunicator, Tag
from dhp_ray.comm.transport import Transport
from dhp_ray.model import delta_rule
from dhp_ray.model.kernels import cpu
from dhp_ray.train.collate import collate
from dhp_ray.train.pack import pack_loss
from tests.packs import make_pack, make_sample, own_payloads, rough_model
from tests.ranks import run_ranks

LEVELS = {"kept": (0.0, False), "recomputed": (1.0, False), "selective": (1.0, True)}


def passes_of(rank: int, degree: int, preset: str) -> dict[str, Any]:
    """For each of LEVELS the gradients of a pass over text and an image, how often attention and runs of the delta rule
    ran and what members exchanged, and how many of the tensors that they returned are there after it, and after a
    forward pass alone.
    """
    made = [make_sample(str(number), parts, preset=preset)
            for number, parts in enumerate(([23, (1, 4, 8), 40], [9], [31]))]
    adapter, pack = rough_model(preset=preset), make_pack(0, list(range(degree)), [sample for sample, _ in made])
    adapter.freeze(["vision"])  # without a backward pass, so that attention of the language model alone runs again
    inputs = collate(pack, own_payloads(pack, {sample.id: payload for sample, payload in made}, rank), rank, adapter)
    transport = Transport("parent", rank, degree, choose("cpu"), 16, timedelta(seconds=30))
    counts: Counter[str] = Counter()
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        counts["forward"] += 1
        found = kernel_forward(*arguments)
        alive.update(found)
        return found

    def backward(*arguments: Any) -> Any:
        counts["backward"] += 1
        return kernel_backward(*arguments)

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        counts["runs of the delta rule"] += 1
        found = delta_rule_run(*arguments)
        if not torch.is_grad_enabled():
            alive.update(found)
        return found

    def exchange(link: Any, sends: Any, receives: Any, tag: Tag) -> Any:
        counts[tag.name] += 1
        return link_exchange(link, sends, receives, tag)

    kernel_forward, kernel_backward, link_exchange = cpu.forward, cpu.backward, PackCommunicator.exchange
    cpu.forward, cpu.backward, delta_rule_run, delta_rule._run = forward, backward, delta_rule._run, run
    PackCommunicator.exchange = exchange  # type: ignore[method-assign]
    results = {}
    for name, level in LEVELS.items():
        adapter.set_activation_checkpointing(*level)
        adapter.module.zero_grad()
        counts.clear()
        pack_loss(adapter, inputs, transport.link(pack.ranks, 0)).backward()
        found = Counter(counts)
        left = [len(alive)]
        gc.collect()
        gc.disable()  # so that what keeps itself alive is found
        pack_loss(adapter, inputs, transport.link(pack.ranks, 0))  # no backward pass
        left.append(len(alive))
        gc.enable()
        results[name] = ({key: parameter.grad.numpy() for key, parameter in adapter.module.named_parameters()
                          if parameter.grad is not None}, found, left)
    transport.close()
    return results


@pytest.mark.parametrize(("degree", "preset"), [
    (1, "tiny"), (3, "tiny_qwen3_moe"),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in ((2, "tiny"), (3, "tiny_qwen3_vl"), (2, "tiny_qwen3_5"), (2, "tiny_internvl")))])
def test_attention_that_is_kept_neither_runs_nor_exchanges_again(degree: int, preset: str) -> None:
    for results in run_ranks(passes_of, degree, degree, preset):
        gradients, counts, _ = results["kept"]
        for name in ("recomputed", "selective"):
            found = results[name][0]
            assert found.keys() == gradients.keys()
            assert all((found[key] == gradients[key]).all() for key in gradients), name
        recomputed, selective = results["recomputed"][1], results["selective"][1]
        assert selective["forward"] == counts["forward"] < recomputed["forward"]
        assert selective["RING_FORWARD"] == counts["RING_FORWARD"] == recomputed["RING_FORWARD"] / 2
        assert selective["backward"] == recomputed["backward"] == counts["backward"]
        runs = [found["runs of the delta rule"] for found in (counts, selective, recomputed)]
        assert runs[0] == runs[1] == 2 / 3 * runs[2]  # with one each in the backward pass
        assert [left for *_, left in results.values()] == [[0, 0]] * 3


def test_a_model_that_recomputes_is_gone_with_its_last_name() -> None:
    adapter = rough_model()
    adapter.set_activation_checkpointing(keeps_attention=True)
    module = weakref.ref(adapter.module)
    gc.collect()
    gc.disable()
    del adapter
    gc.enable()
    assert module() is None
