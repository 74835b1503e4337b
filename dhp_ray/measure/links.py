"""Measures how long ranks take to pass messages and to make process groups."""

from __future__ import annotations

import statistics
from datetime import timedelta
from time import perf_counter

import torch

from dhp_ray.comm.pool import GroupPool
from dhp_ray.measure.member import Member, seconds_of
from dhp_ray.measure.timings import Exchanged

MESSAGE_BYTES = tuple(2**power for power in range(12, 25, 2))
LARGE_BYTES = 2**26
"""Also passed on a device, whose links need messages of this size to reach their bandwidth."""
TIMES, TIMES_QUICK = 25, 9
GROUP_TIMES = 5


def exchanges(member: Member) -> list[Exchanged]:
    """Measure all rings that the ranks may form; returns the times of this rank. Every rank calls this."""
    spec, found = member.spec, []
    rings = [(degree, False, spec.groups(degree)) for degree in spec.degrees()]
    rings += [(2, True, pairs)] if (pairs := spec.pairs_across()) else []
    sizes = MESSAGE_BYTES if member.device.type == "cpu" else (*MESSAGE_BYTES, LARGE_BYTES)
    for degree, across, groups in rings:
        member.transport.prepare(groups)
        own = next((ranks for ranks in groups if member.rank in ranks), None)
        if own is not None:
            found.append(Exchanged(degree, across, {size: _message_s(member, own, size) for size in sizes}))
        member.of_all(0.0)  # ranks without a group wait here
    return found


def _message_s(member: Member, ranks: tuple[int, ...], size: int) -> float:
    link = member.link(ranks)
    there = torch.zeros(size // 4, device=member.device)
    here, times = torch.empty_like(there), []

    def pass_on() -> None:
        link.exchange([(there, (link.index + 1) % link.size)], [(here, (link.index - 1) % link.size)]).wait()

    for _ in range(TIMES_QUICK if member.spec.quick else TIMES):
        times.append(seconds_of(member.device, pass_on))
    return statistics.median(times[2:])


def group_seconds(member: Member, timeout: timedelta) -> dict[int, list[float]]:
    """Measure the seconds that this rank takes to make a group of each degree, with its first exchange. Every rank
    calls this.
    """
    found: dict[int, list[float]] = {}
    for degree in member.spec.degrees() or [2]:
        groups = member.spec.groups(degree)[:1] or member.spec.pairs_across()[:1]
        times = []
        for _ in range(GROUP_TIMES):
            pool = GroupPool(1, timeout, member.accelerator, member.engine.progress)
            member.of_all(0.0)
            begin = perf_counter()
            pool.prepare(groups)
            times.append(perf_counter() - begin)
            pool.clear()
        if any(member.rank in ranks for ranks in groups):
            found[degree] = times
    return found
