from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dhp_ray.model.layout import Blocks
from dhp_ray.model.segment_attention import Segments, segment_attention
from tests.model.test_kernels import dense_attention, inputs

OFFSETS = (0, 4, 8, 9, 13)
ROWS = tuple(slice(*ends) for ends in pairwise(OFFSETS))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"])
def test_output_and_gradients_equal_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    leaves = [x.requires_grad_() for x in inputs(dtype, "cpu")]
    copies = [x.detach().double().requires_grad_() for x in leaves]
    expected, _ = dense_attention(*copies, Blocks(ROWS, ROWS, causal=False), 0.3)
    found = segment_attention(*leaves, Segments.between(OFFSETS), 0.3)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    found.backward(gradient.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(leaves, copies):
        assert ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=tolerance, rtol=tolerance)


def test_segments_of_other_rows_are_refused() -> None:
    q, k, v = inputs(torch.float32, "cpu", 13, 12)
    with pytest.raises(ValueError, match=r"^segment attention: 13 queries and 12 keys; the segments have 13 and 13$"):
        segment_attention(q, k, v, Segments.between(OFFSETS), 0.3)
