"""Errors of the one-rank path against plain transformers, of loss and all gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from dhp_ray.comm.device import CPU
from dhp_ray.comm.pack_communicator import PackCommunicator
from dhp_ray.comm.transport import Transport
from dhp_ray.model.kernels import npu
from dhp_ray.model.language_model import LanguageModel
from dhp_ray.planner.plan.types import Sample
from dhp_ray.train.collate import Payload, collate
from dhp_ray.train.pack import pack_loss
from tests.model.test_fused import stand_in
from tests.packs import Film, make_pack, make_sample, plain_copy, plain_gradients, plain_loss, relative_errors

VIDEO = Film(1.5, ((2, 4, 4), (1, 4, 4)))


def link_of_one_rank() -> PackCommunicator:
    return Transport("pool", 0, 1, CPU, 4, timedelta(seconds=30)).link((0,), 0)


def loss_of(adapter: LanguageModel, sample: Sample, payload: Payload) -> Tensor:
    """The loss sum of one sample on one rank."""
    return pack_loss(adapter, collate(make_pack(0, [0], [sample]), {sample.id: payload}, 0, adapter),
                     link_of_one_rank())


def errors_on_one_rank(
    adapter: LanguageModel, samples: Mapping[str, Sequence[Any]], preset: str = "tiny", fused: bool = False
) -> dict[str, float]:
    """By name of each sample (parts as `make_sample` takes them), and of the parameter whose gradient is furthest off.
    `fused`: with the operators of an NPU, in plain torch.
    """
    plain = plain_copy(adapter)
    if fused:
        stand_in("npu")
        adapter.fuse(npu)
    errors = {}
    for name, parts in samples.items():
        sample, payload = make_sample(name, parts, preset=preset)
        adapter.module.zero_grad()
        loss = loss_of(adapter, sample, payload)
        loss.backward()
        mean, count = plain_loss(plain, payload)
        errors[name] = abs(loss.item() / count - mean.item()) / mean.item()
        _, wanted = plain_gradients(plain, [payload])
        found = {key: torch.zeros_like(value) if value.grad is None else value.grad
                 for key, value in adapter.module.named_parameters()}
        worst = relative_errors(found, wanted)
        errors[f"{name} {max(worst, key=worst.__getitem__)}"] = max(worst.values())
    return errors
