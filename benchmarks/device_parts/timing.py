"""Seconds of calls on a device, and the rate of its matrix products, which every other rate is a share of."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dhp_ray.comm.progress import StreamTimestamp

SIZES = {"cuda": (2048, 4096, 8192, 16384), "cpu": (256, 512)}
"""Rows and columns of the matrices that the rate is the best of."""


def seconds_of(call: Callable[[], Any], device: torch.device, rounds: int = 5, at_least_s: float = 0.02) -> float:
    """The median over rounds of what one call takes, each round of as many calls as take `at_least_s`. The device's own
    time; the host runs ahead of it.
    """
    calls = 1
    while timed(call, device, calls) < at_least_s and calls < 1024:
        calls *= 2
    return statistics.median(timed(call, device, calls) / calls for _ in range(rounds))


def timed(call: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    begin = StreamTimestamp(device)
    for _ in range(calls):
        call()
    return StreamTimestamp(device).since_s(begin)


def compute_type(device: torch.device) -> torch.dtype:
    """What parts compute in: bf16, and fp32 on the CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of the best product of two square matrices in the device's compute type."""
    best = 0.0
    for size in SIZES[device.type]:
        left, right = (torch.randn(size, size, device=device).to(compute_type(device)) for _ in range(2))
        best = max(best, 2.0 * size**3 / seconds_of(partial(torch.matmul, left, right), device))
    return best
