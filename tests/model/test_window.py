"""Attention within a sliding window, beside its definition, and in a model beside plain transformers."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dhp_ray.comm.device import CPU
from dhp_ray.comm.transport import Transport
from dhp_ray.model.attention import PackContext, window_attention
from dhp_ray.model.layout import PackLayout, TokenInterval
from dhp_ray.model.window import window_of
from dhp_ray.train.collate import collate
from dhp_ray.train.pack import pack_loss
from tests.one_rank import errors_on_one_rank
from tests.packs import make_pack, make_sample, plain_copy, plain_gradients, relative_errors, rough_model
from tests.ranks import run_ranks

HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 16, 0.3
TIMEOUT = timedelta(seconds=60)
PACKS = ((70, 33, 1, 20), (3,), (1, 2, 1), (5, 64, 9, 17))
SIZES = (1, 2, 7, 16, 1000)


def inputs_of(lengths: tuple[int, ...]) -> list[Tensor]:
    """q, k, v and the gradient of the output of the whole pack in fp64."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(sum(lengths), heads, WIDTH, generator=generator, dtype=torch.float64)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]


def by_definition(lengths: tuple[int, ...], size: int) -> list[Tensor]:
    """Output and gradients of q, k, v."""
    *inputs, gradient = inputs_of(lengths)
    q, k, v = (x.requires_grad_() for x in inputs)
    outs = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        b, c = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (b, c))
        scores = SCALE * torch.einsum("qhd,khd->hqk", a, b)
        seen = torch.ones(len(a), len(a), dtype=torch.bool).tril().triu(1 - size)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), c))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], gradient)]


def worst_error(layout: PackLayout, size: int, link: object, member: int, recompute: bool) -> float:
    context = PackContext(layout, link, window=window_of(layout, member, size))  # type: ignore[arg-type]
    index, wanted = layout.index(member), by_definition(layout.lengths, size)
    *inputs, gradient = inputs_of(layout.lengths)
    leaves = [x[index].transpose(0, 1)[None].clone().requires_grad_() for x in inputs]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(q * 1, k * 1, v * 1, SCALE, context) * 1

    out = checkpoint(attend, *leaves, use_reentrant=False) if recompute else attend(*leaves)
    out.backward(gradient[index][None])
    found = [out.detach()[0], *(x.grad[0].transpose(0, 1) for x in leaves if x.grad is not None)]
    assert len(found) == 4
    return max([0.0, *(float((mine - whole[index]).abs().max()) for mine, whole in zip(found, wanted) if len(index))])


def all_packs(rank: int, recompute: bool) -> list[float]:
    world = dist.get_world_size()
    transport, ranks = Transport("parent", rank, world, CPU, 0, TIMEOUT), tuple(range(world))
    return [worst_error(PackLayout(lengths, world), size, transport.link(ranks, number) if world > 1 else None, rank,
                        recompute) for number, (lengths, size) in enumerate(product(PACKS, SIZES))]


@pytest.mark.parametrize(("degree", "recompute"), [(1, False), (2, False), (3, True), pytest.param(
    5, False, marks=pytest.mark.slow)])
def test_any_degree_computes_the_definition(degree: int, recompute: bool) -> None:
    errors = torch.tensor(run_ranks(all_packs, degree, recompute))
    assert errors.max() < 1e-9, errors


def test_rows_travel_once_and_no_more_of_them_than_the_window_spans() -> None:
    """Of a sequence of 100 tokens at degree 2, and of one whose window spans other chunks; of intervals of no pattern.
    """
    counts = [window_of(PackLayout((length,), 2), member, 8).receive_counts
              for length in (100, 1000, 12) for member in (0, 1)]
    assert counts == [(0, 7), (7, 0), (0, 7), (7, 0), (0, 6), (3, 0)]
    shards = ((TokenInterval(0, 0, 4), TokenInterval(0, 6, 9)), (TokenInterval(0, 4, 6), TokenInterval(0, 9, 10)))
    window = window_of(PackLayout((10,), 2, shards), 1, 4)
    assert window.receive_counts == (6, 0)
    assert [rows.tolist() for rows in window_of(PackLayout((10,), 2, shards), 0, 4).send_rows] == [
        [], [1, 2, 3, 4, 5, 6]]


def test_a_context_without_a_window_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="context has no window"):
        window_attention(q, q, q, SCALE, PackContext(PackLayout((3,), 1)))


def model_errors(rank: int, settings: dict[str, object], recompute: bool) -> dict[str, float]:
    """Of all gradients of a pack on all ranks, from plain transformers' of its sequences."""
    world = dist.get_world_size()
    adapter = rough_model(preset="tiny_qwen3", use_sliding_window=True, **settings)
    if recompute:
        adapter.set_activation_checkpointing(keeps_attention=True)
    made = [make_sample(name, [length], preset="tiny_qwen3") for name, length in (("a", 150), ("b", 1), ("c", 40))]
    ranks, payloads = tuple(range(world)), {sample.id: payload for sample, payload in made}
    link = Transport("parent", rank, world, CPU, 0, TIMEOUT).link(ranks, 0)
    inputs = collate(make_pack(0, ranks, [sample for sample, _ in made]), payloads, rank, adapter)
    pack_loss(adapter, inputs, link).backward()
    found = {name: torch.zeros_like(value) if value.grad is None else value.grad
             for name, value in adapter.module.named_parameters()}
    for gradient in found.values():
        dist.all_reduce(gradient)
    _, wanted = plain_gradients(plain_copy(adapter).double(), list(payloads.values()))
    return relative_errors(found, wanted) if rank == 0 else {}


MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.mark.parametrize(("degree", "settings", "recompute"), [
    (1, MIXED, False), (3, MIXED, True), pytest.param(2, MIXED, False, marks=pytest.mark.slow),
    pytest.param(5, MIXED | {"layer_types": ["sliding_attention"] * 3}, False, marks=pytest.mark.slow)])
def test_a_model_computes_what_transformers_does(degree: int, settings: dict[str, object], recompute: bool) -> None:
    errors = run_ranks(model_errors, degree, settings, recompute)[0]
    assert max(errors.values()) < 1e-5, errors


def fused_errors(rank: int) -> dict[str, float]:
    adapter = rough_model(preset="tiny_qwen3", use_sliding_window=True, **MIXED)
    return errors_on_one_rank(adapter, {"text": [60]}, "tiny_qwen3", fused=True)


def test_fused_operators_leave_windows_as_they_are() -> None:
    assert max(run_ranks(fused_errors, 1)[0].values()) < 1e-5
