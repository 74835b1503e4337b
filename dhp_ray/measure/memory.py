"""The most memory that a pack takes of a rank, as it is measured."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from dhp_ray.measure.member import Member
from dhp_ray.measure.rounds import Round, memory_loads, plan_of


def peaks(member: Member) -> list[tuple[int, float]]:
    """(tokens, bytes at the highest moment of a step above what was held before it) of packs of growing size; every
    rank calls this. Empty where the system does not tell.
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
    """Forget the highest moment so far; bytes held now. None where the system does not tell."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.reset_peak_memory_stats()
        return float(module.memory_allocated())
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM becomes VmRSS
        return _status("VmRSS")
    return None


def peak(device: torch.device) -> float:
    """Bytes at the highest moment since `reset_peak`."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).max_memory_allocated())
    return _status("VmHWM")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
