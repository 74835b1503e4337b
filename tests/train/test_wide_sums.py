from __future__ import annotations

import pytest
import torch

from dhp_ray.train.wide_sums import wide_add


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_widened_before_they_are_added(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sums, values = torch.randn(3, 1111), torch.randn(3, 1111).to(dtype)
    expected = sums + values.float()
    found = sums.to(device)
    wide_add(found.device)(found, values.to(device))
    wide_add(found.device)(found[:, :0], values[:, :0].to(device))
    strided = torch.randn(7, 5).to(dtype)
    transposed = torch.zeros(5, 7, device=device)
    wide_add(found.device)(transposed, strided.t().to(device))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(transposed.cpu(), strided.t().float())
