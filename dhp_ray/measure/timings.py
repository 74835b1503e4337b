"""What ranks report of their measurements: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class PackTiming(NamedTuple):
    """One rank's part of a pack (or of a phase, by its number in `planner/work.py`): seconds of compute and of waiting
    for peers; when it began and ended, in seconds from the step's start.
    """

    group: int
    busy_s: float
    blocked_s: float
    start_s: float
    end_s: float


class StepTiming(NamedTuple):
    """One rank's account of one run of a round."""

    step_s: float
    packs: tuple[PackTiming, ...]


class Exchanged(NamedTuple):
    """Every member of a ring of `degree` ranks sent a message on and received one: median seconds by its bytes."""

    degree: int
    across: bool
    seconds: dict[int, float]


@dataclass(frozen=True)
class PartResult:
    """What one rank reports of a part: the repeats of each round; or its exchanges, seconds to make groups by degree,
    or (tokens, peak bytes) of packs.
    """

    rounds: list[list[StepTiming]] = field(default_factory=list)
    exchanged: list[Exchanged] = field(default_factory=list)
    group_s: dict[int, list[float]] = field(default_factory=dict)
    peaks: list[tuple[int, float]] = field(default_factory=list)
