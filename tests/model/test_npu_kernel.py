"""The kernel of NPUs over its operators in plain torch: what it asks of them, and what it makes of their results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import pytest
import torch
from torch import Tensor

from dhp_ray.model.kernels import npu
from dhp_ray.model.layout import Blocks
from dhp_ray.model.segment_attention import Kernel, Segments
from tests.contracts.npu_operators import MAX_LENGTHS, torch_npu
from tests.model.test_kernels import EQUAL, OBLONG, SQUARE, dense_attention, grouped, inputs


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu())


def short_segments(number: int, causal: bool) -> Blocks:
    """Of one to three tokens; where they are not causal, keys are of another length than queries."""
    def blocks(shift: int) -> tuple[slice, ...]:
        ends = [0]
        for place in range(number):
            ends.append(ends[-1] + 1 + (place + shift) % 3)
        return tuple(slice(start, stop) for start, stop in pairwise(ends))

    return Blocks(blocks(0), blocks(0 if causal else 1), causal=causal)


def run(blocks: Blocks, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, what the kernel gives and what the definition gives, of output, log-sum-exp and gradients."""
    segments, scale = Segments.of(blocks), 0.3
    q, k, v = inputs(dtype, "cpu", blocks.queries[-1].stop, max(piece.stop for piece in blocks.keys))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = dense_attention(*leaves, blocks, scale)
    gradient = torch.randn(expected.shape).to(dtype)
    expected.backward(gradient.double())
    rows, key_rows = segments.query_rows, segments.key_rows
    out, lse = npu.forward(q[rows], k[key_rows], v[key_rows], segments, scale)
    yield "output", out, expected.detach()
    yield "log-sum-exp", lse, expected_lse.detach()
    parts = npu.backward(gradient, q[rows], k[key_rows], v[key_rows], out, lse, segments, scale)
    for name, part, at, leaf in zip("qkv", parts, (rows, key_rows, key_rows), leaves):
        total = torch.zeros(leaf.shape, dtype=torch.float64)
        yield name, total.index_add_(0, torch.arange(len(leaf))[at], part.double()), leaf.grad


def test_its_grouped_products_equal_the_definition() -> None:
    for found, wanted in grouped(cast(Kernel, npu), "cpu", torch.float32):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("blocks", [SQUARE, OBLONG, EQUAL], ids=["causal", "full", "equal lengths"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-2)], ids=["fp32", "bf16"])
def test_it_equals_the_definition(blocks: Blocks, dtype: torch.dtype, tolerance: float) -> None:
    for name, found, expected in run(blocks, dtype):
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance,
                                   msg=lambda text, name=name: f"{name}: {text}")


def test_the_backward_takes_the_merged_output_and_log_sum_exp() -> None:
    """Half of the keys at a time, with the output over all of them: the gradients of the whole."""
    q, k, v = inputs(torch.float32, "cpu", num_queries=7, num_keys=10)

    def segments(num_keys: int) -> Segments:
        return Segments.of(Blocks((slice(0, 7),), (slice(0, num_keys),), causal=False))

    out, lse = npu.forward(q, k, v, segments(10), 0.25)
    gradient = torch.randn_like(out)
    whole = npu.backward(gradient, q, k, v, out, lse, segments(10), 0.25)
    first = npu.backward(gradient, q, k[:4], v[:4], out, lse, segments(4), 0.25)
    second = npu.backward(gradient, q, k[4:], v[4:], out, lse, segments(6), 0.25)
    torch.testing.assert_close(first[0] + second[0], whole[0])
    for place in (1, 2):
        torch.testing.assert_close(torch.cat((first[place], second[place])), whole[place])


@pytest.mark.parametrize(("number", "causal"), [
    (MAX_LENGTHS + 1, True), pytest.param(2 * MAX_LENGTHS + 3, False, marks=pytest.mark.slow)
], ids=["two calls", "three calls"])
@pytest.mark.seconds
def test_calls_with_many_segments_are_split(number: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators take 1,024 lengths; what comes out is bit for bit what they would give if they took them all."""
    blocks = short_segments(number, causal)
    split = [found for _, found, _ in run(blocks)]
    monkeypatch.setattr("tests.contracts.npu_operators.MAX_LENGTHS", number)
    monkeypatch.setattr(npu, "MAX_SEGMENTS", number)
    for in_parts, (name, found, expected) in zip(split, run(blocks), strict=True):
        assert torch.equal(in_parts, found), name
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_unsplit_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "MAX_SEGMENTS", MAX_LENGTHS + 1)
    with pytest.raises(RuntimeError, match="1025 lengths in TND; supported: 1 to 1024"):
        list(run(short_segments(MAX_LENGTHS + 1, causal=True)))
