"""Turns what ranks report of their rounds into seconds of packs: medians over ranks and repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dhp_ray.credentials import MOST_OF_ERROR, shown
from dhp_ray.measure.rounds import Spec, rounds_of
from dhp_ray.measure.timings import PackTiming, PartResult, StepTiming
from dhp_ray.planner.plan import Plan
from dhp_ray.planner.rates import pairs_of
from dhp_ray.planner.work import BACKWARD, ENCODE, IMAGES, work_of


class MeasureError(ValueError):
    """Measurements to which no cost can be fitted; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message, MOST_OF_ERROR))


@dataclass(frozen=True)
class PackSeconds:
    """A pack: the `amounts` of each member, (members, terms) (`planner/work.py`); and median seconds: `busy_s`, the
    compute of the busiest member; `exposed_s`, what the pack takes in addition, if it has several members; `whole_s`,
    from begin to end.
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
        return bool(self.amounts[:, IMAGES].any())

    def amounts_at(self, block: float) -> np.ndarray:
        """The amounts, for kernels that take `block` keys at a time; (members, terms)."""
        found = self.amounts.copy()
        found[:, 0] = pairs_of(self.lengths, block).sum() / self.degree
        return found


@dataclass
class Observations:
    """All observations of a session. `rest_s`: for each round, the seconds of its step before and after its
    packs. `forward_share`: for each round with images apart, the share of the first phase. `spreads`: of each median
    over repeats, how far the middle half of them lies apart, as a share of it.
    """

    packs: list[PackSeconds] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)
    forward_share: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    num_repeats: int = 0


def observed(spec: Spec, results: dict[str, Sequence[PartResult]]) -> Observations:
    """Evaluate the rounds of every part; `results` by part, then by rank."""
    found = Observations()
    for part, by_rank in results.items():
        for number, round_ in enumerate(rounds_of(part, spec)):
            _add(found, spec, part, round_.plan, [result.rounds[number] for result in by_rank])
    return found


def _add(found: Observations, spec: Spec, part: str, plan: Plan, timings: Sequence[Sequence[StepTiming]]) -> None:
    """Add one round, given the repeats of each rank."""
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
        times = [[[repeat[number] for repeat in by_rank[rank]] for rank in plan.groups[number].ranks]
                 for number in numbers]
        seconds = [_pack_s(members, found) for members in times]
        busy_s, exposed_s, whole_s = np.median(seconds, axis=0).tolist()
        group = plan.groups[numbers[0]]
        lengths = np.array([plan.samples[row].num_tokens for row in group.pack.sequences], dtype=np.float64)
        found.packs.append(PackSeconds(
            part, group.degree, plan.cluster.crosses(group.ranks), lengths,
            work.amounts[work.group == numbers[0]], busy_s, exposed_s, whole_s))


def _pack_s(members: Sequence[Sequence[PackTiming]], found: Observations) -> tuple[float, float, float]:
    """Return (compute seconds of the busiest member, seconds that the pack takes in addition, seconds from begin to end
    of the member that takes longest), given the repeats of each member.

    In a repeat, all members together take the compute of the busiest one and the least time that any of them waits:
    members that wait for each other in every layer take longer than the busiest of them alone.
    """
    busy_s, blocked_s, whole_s = (np.array([[value(time) for time in member] for member in members]) for value in (
        lambda time: time.busy_s, lambda time: time.blocked_s, lambda time: time.end_s - time.start_s))
    busiest_s = max(_median(of_member, found) for of_member in busy_s)
    together_s = float(np.median(busy_s.max(axis=0) + blocked_s.min(axis=0)))
    return busiest_s, max(0.0, together_s - busiest_s), float(np.median(whole_s.max(axis=0)))


def _phase_s(of_rank: Sequence[dict[int, PackTiming]], phase: int, found: Observations) -> float:
    """Median seconds of a phase; 0 if the rank does not have it."""
    times = [repeat[phase].busy_s for repeat in of_rank if phase in repeat]
    return _median(np.array(times), found) if times else 0.0


def _median(values: np.ndarray, found: Observations) -> float:
    """The median of repeats; counts them in `found`, with their spread."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    found.num_repeats += len(values)
    found.spreads.append((high - low) / middle if middle else 0.0)
    return float(middle)


def _rest_s(by_rank: Sequence[Sequence[StepTiming]]) -> float:
    """Median seconds of a round's step on the slowest rank, without the time from its first pack to its last one."""
    return float(np.median([_outside_s(steps) for steps in zip(*by_rank)]))


def _outside_s(steps: Sequence[StepTiming]) -> float:
    times = [time for step in steps for time in step.packs]
    span_s = max(time.end_s for time in times) - min(time.start_s for time in times)
    return max(0.0, max(step.step_s for step in steps) - span_s)
