"""Kernels of devices beside their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dhp_ray.model.kernels import cuda
from dhp_ray.model.layout import Blocks
from dhp_ray.model.segment_attention import Kernel, Segments, kernel_for

SQUARE = Blocks((slice(0, 5), slice(5, 12), slice(12, 13)), (slice(0, 5), slice(5, 12), slice(12, 13)), causal=True)
EQUAL = Blocks((slice(0, 5), slice(5, 10), slice(10, 13)), (slice(0, 3), slice(3, 6), slice(6, 13)), causal=False)
OBLONG = Blocks((slice(1, 5), slice(5, 12)), (slice(0, 9), slice(8, 11)), causal=False)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float) -> tuple[Tensor, Tensor]:
    """The definition: (rows, H, D) and (H, rows) of the blocks' queries, one after the other."""
    groups = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for queries, keys in zip(blocks.queries, blocks.keys):
        scores = scale * torch.einsum("qhd,khd->hqk", q[queries], k[keys].repeat_interleave(groups, 1))
        if blocks.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys].repeat_interleave(groups, 1)))
    return torch.cat(outs), torch.cat(lses, 1)


def inputs(dtype: torch.dtype, device: str, num_queries: int = 13, num_keys: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (num_queries, 6, 16), (num_keys, 2, 16), (num_keys, 2, 16)
    q, k, v = (torch.randn(shape).to(dtype).to(device) for shape in shapes)
    return q, k, v


def grouped(kernel: Kernel, device: str, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """What a kernel gives of grouped products and sums, and their definition; the first, third and last group of six
    have no rows.
    """
    torch.manual_seed(0)
    x, y, weight = (torch.randn(shape).to(device, dtype) for shape in ((21, 16), (21, 24), (6, 16, 24)))
    ends = [0, 5, 5, 6, 21, 21]
    on_device = torch.tensor(ends, dtype=torch.int32, device=device)
    groups = [slice(*pair) for pair in pairwise((0, *ends))]
    yield kernel.grouped_products(x, weight, on_device), torch.cat(
        [x[rows].double() @ matrix.double() for rows, matrix in zip(groups, weight)])
    yield kernel.grouped_products(y, weight.transpose(1, 2), on_device), torch.cat(
        [y[rows].double() @ matrix.double().t() for rows, matrix in zip(groups, weight)])
    yield kernel.grouped_sums(x, y, on_device), torch.stack(
        [x[rows].double().t() @ y[rows].double() for rows in groups])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_grouped_products_equal_the_definition(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("grouped products on CUDA are of bf16")
    for found, wanted in grouped(kernel_for(torch.device(device)), device, dtype):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [SQUARE, OBLONG, EQUAL], ids=["causal", "full", "equal lengths"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_kernel_equals_the_definition(device: str, blocks: Blocks, dtype: torch.dtype, tolerance: float) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("flash attention on CUDA has no fp32")
    kernel, segments, scale = kernel_for(torch.device(device)), Segments.of(blocks).to(torch.device(device)), 0.3
    q, k, v = inputs(dtype, device)
    leaves = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = dense_attention(*leaves, blocks, scale)
    gradient = torch.randn(expected.shape).to(dtype)
    expected.backward(gradient.double())

    rows, key_rows = segments.query_rows, segments.key_rows
    out, lse = kernel.forward(q[rows], k[key_rows], v[key_rows], segments, scale)
    torch.testing.assert_close(out.double().cpu(), expected.detach(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), expected_lse.detach(), atol=tolerance, rtol=tolerance)

    parts = kernel.backward(gradient.to(device), q[rows], k[key_rows], v[key_rows], out, lse, segments, scale)
    for part, at, leaf in zip(parts, (rows, key_rows, key_rows), leaves):
        named = torch.arange(len(leaf), device=device)[at].cpu()
        total = torch.zeros(leaf.shape, dtype=torch.float64).index_add_(0, named, part.double().cpu())
        torch.testing.assert_close(total, leaf.grad, atol=tolerance * 4, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_backward_takes_the_merged_output_and_log_sum_exp(device: str) -> None:
    """Half of the keys at a time, with the output over all of them: the gradients of the whole."""
    kernel, scale, dtype = kernel_for(torch.device(device)), 0.25, torch.float32 if device == "cpu" else torch.bfloat16
    tolerance = 2e-6 if device == "cpu" else 3e-2
    q, k, v = inputs(dtype, device, num_queries=7, num_keys=10)

    def segments(num_keys: int) -> Segments:
        return Segments.of(Blocks((slice(0, 7),), (slice(0, num_keys),), causal=False)).to(torch.device(device))

    out, lse = kernel.forward(q, k, v, segments(10), scale)
    gradient = torch.randn_like(out)
    whole = kernel.backward(gradient, q, k, v, out, lse, segments(10), scale)
    first = kernel.backward(gradient, q, k[:4], v[:4], out, lse, segments(4), scale)
    second = kernel.backward(gradient, q, k[4:], v[4:], out, lse, segments(6), scale)
    torch.testing.assert_close(first[0] + second[0], whole[0], atol=tolerance, rtol=tolerance)
    for place in (1, 2):
        torch.testing.assert_close(torch.cat((first[place], second[place])), whole[place], atol=tolerance,
                                   rtol=tolerance)


@pytest.mark.parametrize("blocks", [SQUARE, OBLONG], ids=["causal", "full"])
def test_cuda_kernel_fits_torchs_operators(blocks: Blocks) -> None:
    """Without a GPU, on tensors without data: the operators take these arguments and give these shapes."""
    device = torch.device("meta")
    segments = Segments.of(blocks)
    num_queries, num_keys = segments.query_offsets[-1], segments.key_offsets[-1]
    q, k = (torch.empty(rows, heads, 16, dtype=torch.bfloat16, device=device)
            for rows, heads in ((num_queries, 6), (num_keys, 2)))
    out, lse = cuda.forward(q, k, k, segments, 0.3)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((6, num_queries), torch.float32)
    assert [part.shape for part in cuda.backward(out, q, k, k, out, lse, segments, 0.3)] == [q.shape, k.shape, k.shape]


def test_cuda_kernel_refuses_fp32() -> None:
    q = torch.empty(13, 6, 16)
    with pytest.raises(ValueError, match=r"computes in bf16, got torch\.float32"):
        cuda.forward(q, q, q, Segments.of(SQUARE), 0.3)


def test_contiguous_rows_are_views_and_scattered_rows_an_index() -> None:
    whole = Segments.of(SQUARE)
    assert whole.query_rows == slice(0, 13)
    assert whole.query_offsets == (0, 5, 12, 13)
    assert (whole.longest_query, whole.longest_key) == (7, 7)
    scattered = Segments.of(OBLONG)
    assert scattered.query_rows == slice(1, 12)
    assert isinstance(scattered.key_rows, torch.Tensor)
    assert scattered.key_rows.tolist() == [*range(9), 8, 9, 10]
    assert scattered.key_offsets_tensor.tolist() == [0, 9, 12]
    assert scattered.key_offsets_tensor.dtype == torch.int32


def test_neighbours_of_equal_lengths_are_one_run() -> None:
    segments = Segments.between((0, 4, 8, 12, 13, 17, 19, 21))
    assert segments.runs == [(3, slice(0, 12), slice(0, 12)), (1, slice(12, 13), slice(12, 13)),
                                     (1, slice(13, 17), slice(13, 17)), (2, slice(17, 21), slice(17, 21))]
    assert not segments.causal
    # as many queries, but not as many keys
    oblong = Segments.of(Blocks((slice(0, 2), slice(2, 4)), (slice(0, 5), slice(0, 6)), causal=False))
    assert oblong.runs == [(1, slice(0, 2), slice(0, 5)), (1, slice(2, 4), slice(5, 11))]


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel for device 'meta'"):
        kernel_for(torch.device("meta"))
