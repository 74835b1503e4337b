"""Measures the peak memory of packs on a rank."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from dhp_ray.measure.member import Member
from dhp_ray.measure.rounds import Round, memory_loads, plan_of


def peaks(member: Member) -> list[tuple[int, float]]:
    """Measure packs of growing size: (tokens, peak bytes of a step above those held before it). Every rank calls this.
    Empty if the system does not report memory.
    """
    found = []
    for load in memory_loads(member.spec):
        packs = [((rank,), load) for rank in range(member.spec.num_ranks)]
        before = reset_peak(member.device)
        if before is None:
            return []
        member.timed(Round("memory", plan_of(packs, member.spec)))
        found.append((member.spec.sizes.tokens(load), max(0.0, peak(member.device) - before)))
    return found


def reset_peak(device: torch.device) -> float | None:
    """Reset the peak and return the bytes held now; None if the system does not report them."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats()
        return float(module.memory_allocated())
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM becomes VmRSS
        return _status("VmRSS")
    return None


def peak(device: torch.device) -> float:
    """Peak bytes since `reset_peak`."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).max_memory_allocated())
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
