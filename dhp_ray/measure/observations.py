"""Turns what ranks report of their rounds into seconds of packs: medians over ranks and repeats, without outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dhp_ray.measure.rounds import Spec, rounds_of
from dhp_ray.measure.timings import AT_BEST, PackTiming, PartResult, StepTiming
from dhp_ray.planner.plan import Plan
from dhp_ray.planner.rates import pairs_of
from dhp_ray.planner.work import BACKWARD, ENCODE, IMAGES, work_of

OUTLIER = 1.3
"""A repeat that takes more than this many times the median of its pack is an outlier."""
QUIETEST = 1 / 3
"""Where ranks wait for each other, this share of the repeats counts: those that lost least to other processes."""


class MeasureError(ValueError):
    """Measurements to which no cost can be fitted; the message is one line."""


@dataclass(frozen=True)
class PackSeconds:
    """A pack: its `amounts` (`planner/work.py`), each that of the member with most; and median seconds: `busy_s`, the
    compute of the busiest member; `exposed_s`, the waiting of the member that arrives last, if there are several;
    `whole_s`, from begin to end.
    """

    part: str
    degree: int
    across: bool
    lengths: np.ndarray
    amounts: np.ndarray
    busy_s: float
    exposed_s: float
    whole_s: float

    @property
    def tokens(self) -> float:
        return float(self.lengths.sum())

    @property
    def has_images(self) -> bool:
        return bool(self.amounts[IMAGES].any())

    def amounts_at(self, block: float) -> np.ndarray:
        """The amounts, for kernels that take `block` keys at a time."""
        return np.concatenate([[pairs_of(self.lengths, block).sum() / self.degree], self.amounts[1:]])


@dataclass
class Observations:
    """All observations of a session. `num_disturbed`: repeats of rounds that do not count because cores were too slow.
    `rest_s`: for each round, the seconds of its step before and after its packs.
    `forward_share`: for each round with images apart, the share of the first phase.
    """

    packs: list[PackSeconds] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)
    forward_share: list[float] = field(default_factory=list)
    num_repeats: int = 0
    num_outliers: int = 0
    num_disturbed: int = 0


def observed(spec: Spec, results: dict[str, Sequence[PartResult]]) -> Observations:
    """Evaluate the rounds of every part; `results` by part, then by rank."""
    found = Observations()
    for part, by_rank in results.items():
        for number, round_ in enumerate(rounds_of(part, spec)):
            _add(found, spec, part, round_.plan, [result.rounds[number] for result in by_rank])
    return found


def _at_best(timings: Sequence[Sequence[StepTiming]]) -> list[list[StepTiming]]:
    """For each rank, the repeats in which all cores were at their best, or at least the third with the fastest cores.
    """
    slowness = np.array([timing.slowness for timing in timings[0]])  # the same on all ranks
    limit = max(AT_BEST, float(np.quantile(slowness, QUIETEST)))
    return [[timing for timing, slow in zip(of_rank, slowness) if slow <= limit] for of_rank in timings]


def _add(found: Observations, spec: Spec, part: str, plan: Plan, timings: Sequence[Sequence[StepTiming]]) -> None:
    """Add one round, given the repeats of each rank."""
    found.num_disturbed += len(timings[0])
    timings = _at_best(timings)
    found.num_disturbed -= len(timings[0])
    found.rest_s.append(_rest_s(timings))
    by_rank = [[{timing.group: timing for timing in step.packs} for step in of_rank] for of_rank in timings]
    work = work_of(plan)
    if part == "apart":
        shares = [_phase_s(of_rank, ENCODE, found) / (_phase_s(of_rank, ENCODE, found)
                                                      + _phase_s(of_rank, BACKWARD, found))
                  for of_rank in by_rank if ENCODE in of_rank[0]]
        found.forward_share.append(float(np.median(shares)))
        return
    alike: dict[tuple[int, ...], list[int]] = {}  # groups that run the same pack
    for number, group in enumerate(plan.groups):
        alike.setdefault(group.pack.sequences, []).append(number)
    for numbers in alike.values():
        seconds = [_pack_s([by_rank[rank] for rank in plan.groups[number].ranks], number, found) for number in numbers]
        busy_s, exposed_s, whole_s = np.median(seconds, axis=0).tolist()
        group = plan.groups[numbers[0]]
        lengths = np.array([plan.samples[row].num_tokens for row in group.pack.sequences], dtype=np.float64)
        found.packs.append(PackSeconds(
            part, group.degree, plan.cluster.crosses(group.ranks), lengths,
            work.amounts[work.group == numbers[0]].max(axis=0), busy_s, exposed_s, whole_s))


def _pack_s(
    members: Sequence[Sequence[dict[int, PackTiming]]], group: int, found: Observations
) -> tuple[float, float, float]:
    """Return (compute seconds of the busiest member, waiting of the member that arrives last, seconds from begin to end
    of the member that takes longest).

    The time that a member waits for disturbed peers counts as waiting.
    """
    times = [[repeat[group] for repeat in member] for member in members]
    busy_s = [_median(np.array([time.busy_s - time.lost_s for time in of_member]), found) for of_member in times]
    lost_s = np.array([[time.lost_s for time in of_member] for of_member in times])
    quiet = quietest(lost_s.sum(axis=0))
    blocked_s = np.array([[time.blocked_s for time in of_member] for of_member in times])[:, quiet]
    whole_s = np.array([[time.end_s - time.start_s for time in of_member] for of_member in times]) - lost_s
    return max(busy_s), float(np.median(blocked_s.min(axis=0))), float(np.median(whole_s[:, quiet].max(axis=0)))


def quietest(lost_s: np.ndarray) -> np.ndarray:
    """The repeats that count, given the seconds that each lost; of equal ones, the first."""
    found: np.ndarray = np.argsort(lost_s, kind="stable")[: max(1, round(QUIETEST * len(lost_s)))]
    return found


def _phase_s(of_rank: Sequence[dict[int, PackTiming]], phase: int, found: Observations) -> float:
    """Median seconds of a phase; 0 if the rank does not have it."""
    times = [repeat[phase] for repeat in of_rank if phase in repeat]
    return _median(np.array([time.busy_s - time.lost_s for time in times]), found) if times else 0.0


def _median(values: np.ndarray, found: Observations) -> float:
    """The median without outliers; counts repeats and outliers in `found`."""
    kept = values <= OUTLIER * np.median(values)
    found.num_repeats += len(values)
    found.num_outliers += int((~kept).sum())
    return float(np.median(values[kept]))


def _rest_s(by_rank: Sequence[Sequence[StepTiming]]) -> float:
    """Seconds of a round's step on the slowest rank, without the time from its first pack to its last one."""
    repeats = list(zip(*by_rank))
    lost_s = np.array([sum(step.lost_s - sum(time.lost_s for time in step.packs) for step in steps)
                       for steps in repeats])
    return float(np.median([_outside_s(repeats[number]) for number in quietest(lost_s).tolist()]))


def _outside_s(steps: Sequence[StepTiming]) -> float:
    times = [time for step in steps for time in step.packs]
    lost_s = min(step.lost_s - sum(time.lost_s for time in step.packs) for step in steps)
    span_s = max(time.end_s for time in times) - min(time.start_s for time in times)
    return max(0.0, max(step.step_s for step in steps) - span_s - max(0.0, lost_s))
