"""Measures one part on one rank; all ranks call this with the same parts in the same order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from dhp_ray.measure.links import exchanges, group_seconds
from dhp_ray.measure.member import Member
from dhp_ray.measure.memory import peaks
from dhp_ray.measure.rounds import rounds_of
from dhp_ray.measure.timings import PartResult


def measure_part(
    part: str, member: Member, timeout: timedelta,
    progress: Callable[[float], None] = lambda share: None, earlier: PartResult | None = None,
) -> PartResult:
    """Measure a part of PARTS; every rank makes the same call. `progress` is called
    with the share that is done; `earlier`: what earlier passes over its rounds gave, which the result then includes.
    """
    match part:
        case "exchanges":
            return PartResult(exchanged=exchanges(member))
        case "groups":
            return PartResult(group_s=group_seconds(member, timeout))
        case "memory":
            return PartResult(peaks=peaks(member))
    rounds, found = rounds_of(part, member.spec), []
    for number, round_ in enumerate(rounds):
        found.append(member.timed(round_, earlier.rounds[number] if earlier else []))
        progress((number + 1) / len(rounds))
    return PartResult(rounds=found)
