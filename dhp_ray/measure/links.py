"""Measures how long ranks take to pass messages, to make process groups, and to read and add in each other's memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist

from dhp_ray.comm.node_memory import share_memory
from dhp_ray.comm.pool import GroupPool
from dhp_ray.measure.clock import lost_s, undisturbed
from dhp_ray.measure.member import Member, seconds_of
from dhp_ray.measure.timings import Exchanged

MESSAGE_BYTES = tuple(2**power for power in range(12, 25, 2))
LARGE_BYTES = 2**26
"""Also passed on a device, whose links need messages of this size to reach their bandwidth."""
TIMES, TIMES_QUICK = 25, 9
GROUP_TIMES = 5
ONE_SIDED_BYTES = 2**24


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

    with undisturbed(member.preempts):
        for _ in range(TIMES_QUICK if member.spec.quick else TIMES):
            before = lost_s()
            seconds = seconds_of(member.device, pass_on)
            times.append(seconds - min(seconds, member.lost_since(before)))
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


def one_sided(member: Member, group: dist.ProcessGroup | None) -> dict[str, list[float]]:
    """Measure the bytes per second at which this rank reads the memory of another rank on its node, and adds fp32 sums
    to it, several times each. Every rank of the one node calls this, with a gloo group of all ranks.

    Raises:
        NodeMemoryError: the ranks cannot share memory.
    """
    ranks = range(member.spec.num_ranks)
    memory = share_memory(member.device, ONE_SIDED_BYTES, ranks, member.rank, group)
    other = (member.rank + 1) % len(ranks)
    mine = torch.ones(ONE_SIDED_BYTES // 4, device=member.device)

    def read() -> None:
        mine.copy_(memory.parts[other].view(torch.float32))

    def add() -> None:
        with memory.locked(other, 0):
            memory.add(memory.parts[other].view(torch.float32), mine)

    found: dict[str, list[float]] = {}
    try:
        for name, call in (("read_bytes_per_s", read), ("add_bytes_per_s", add)):
            found[name] = [ONE_SIDED_BYTES / max(1e-9, seconds) for seconds in _repeated(member, call)]
        member.of_all(0.0)
    finally:
        memory.close()
    return found


def _repeated(member: Member, call: Callable[[], None]) -> Sequence[float]:
    times = []
    for _ in range(TIMES_QUICK):
        before = lost_s()
        seconds = seconds_of(member.device, call)
        times.append(seconds - min(seconds, member.lost_since(before)))
    return times[2:]
