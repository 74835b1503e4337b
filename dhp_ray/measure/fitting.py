"""Fits a cost's constants to what ranks report of their rounds: medians over ranks and repeats, then least squares.

    a pack on one rank   seconds = amounts (`planner/cost/work.py`) x constants of compute
    a message            seconds = waiting + bytes / bandwidth, by degree and link
    a pack's ring        seconds - compute / d = latency_s (d - 1) + max(0, slowness (d - 1) bytes / d / bandwidth
                                                                            - overlap (d - 1) / d * attention / d)
                                                 + window_s, which is known

Every constant is at least 0. Errors are relative to the measured time, so a short pack counts as much as a long one.
`slowness`, at least 1, is the time of an exchange beside compute over its time alone, with all else that a ring does
for each token that travels (it merges outputs, and adds up gradients in fp32). With sync=micro_batch a ring's messages
queue behind those that gather parameters, so `latency_s` is fitted for each mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dhp_ray.credentials import MOST_OF_ERROR, shown
from dhp_ray.measure.rounds import Exchanged, PartResult, Spec, StepTiming
from dhp_ray.planner.cost.refit import bounded_least_squares, weighted_median
from dhp_ray.planner.cost.work import IMAGES, TERMS, work_of
from dhp_ray.planner.plan.types import Plan
from dhp_ray.train.results import PackTime

SPARE = 3  # different packs that must be measured in addition to one for each constant
SLOWNESS = np.geomspace(1.0, 32.0, 41)
OVERLAP = np.linspace(0.0, 1.0, 21)
AS_GOOD = 1.05  # points of the grid with an error of up to this many times the least error count as equally good


class MeasureError(ValueError):
    """Measurements to which no cost can be fitted; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message, MOST_OF_ERROR))


@dataclass(frozen=True)
class PackSeconds:
    """A pack: the `amounts` of each member, (members, terms); and median seconds: `busy_s`, the compute of the busiest;
    `together_s`, with what members wait for one another; `whole_s`, from begin to end.
    """

    degree: int
    across: bool
    tokens: float
    amounts: np.ndarray
    busy_s: float
    together_s: float
    whole_s: float

    @property
    def has_images(self) -> bool:
        return bool(self.amounts[:, IMAGES].any())


@dataclass
class Observations:
    """All observations of a session. `rest_s`: for each round, the seconds of its step before and after its packs.
    `spreads`: of each median over repeats, how far the middle half of them lies apart, as a share of it.
    """

    packs: list[PackSeconds] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    num_repeats: int = 0

    @property
    def fixed_s(self) -> float:
        """Seconds of a step around its packs: `fixed_s` of `step`, `update_s` of `micro_batch`."""
        return float(np.median(self.rest_s))

    def median(self, values: Sequence[float] | np.ndarray) -> float:
        """The median of repeats; counts them, with their spread."""
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        self.num_repeats += len(values)
        self.spreads.append((high - low) / middle if middle else 0.0)
        return float(middle)


def observed(spec: Spec, results: dict[str, Sequence[PartResult]]) -> Observations:
    """Evaluate the rounds of every part; `results` by part, then by rank."""
    found = Observations()
    for part, by_rank in results.items():
        for number, plan in enumerate(spec.rounds(part)):
            timings = [result.rounds[number] for result in by_rank]
            found.rest_s.append(float(np.median([_rest_s(steps) for steps in zip(*timings)])))
            times = [[{time.index: time for time in step.packs} for step in of_rank] for of_rank in timings]
            _add_packs(found, plan, times)
    return found


def _rest_s(steps: Sequence[StepTiming]) -> float:
    """Seconds of a step on the slowest rank, without the time from its first pack to its last one."""
    times = [time for step in steps for time in step.packs]
    span_s = max(time.end_s for time in times) - min(time.start_s for time in times)
    return max(0.0, max(step.step_s for step in steps) - span_s)


def _add_packs(found: Observations, plan: Plan, times: Sequence[Sequence[dict[int, PackTime]]]) -> None:
    """Add the packs of a round: medians over the groups that run the same pack. `times`: by rank and repeat."""
    work = work_of(plan)
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, group in enumerate(plan.groups):
        alike.setdefault(group.sequences, []).append(number)
    for numbers in alike.values():
        seconds = []
        for number in numbers:
            members = [[repeat[number] for repeat in times[rank]] for rank in plan.groups[number].ranks]
            busy, blocked, whole = np.array([[(time.busy_s, time.blocked_s, time.end_s - time.start_s)
                                              for time in member] for member in members]).transpose(2, 0, 1)
            busy_s = max(found.median(of_member) for of_member in busy)
            # members that wait for each other in every layer take longer than the busiest of them alone: in a repeat,
            # they take the compute of the busiest one and the least time that any of them waits
            together_s = float(np.median(busy.max(axis=0) + blocked.min(axis=0)))
            seconds.append((busy_s, max(busy_s, together_s), float(np.median(whole.max(axis=0)))))
        group = plan.groups[numbers[0]]
        tokens = sum(plan.samples[row].num_tokens for row in group.sequences)
        found.packs.append(PackSeconds(group.degree, plan.cluster.crosses(group.ranks), tokens,
                                       work.amounts[work.group == numbers[0]], *np.median(seconds, axis=0).tolist()))


class Fit(NamedTuple):
    """Constants, the mean relative error of each, weighted by its share, and seconds of each measurement."""

    constants: dict[str, float]
    errors: dict[str, float]
    predicted: np.ndarray
    measured: np.ndarray

    def seconds(self, pack: PackSeconds) -> float:
        """The seconds of the busiest member's compute by this fit."""
        return float((pack.amounts @ np.array(list(self.constants.values()))).max())

    @property
    def relative_errors(self) -> np.ndarray:
        return np.abs(self.predicted / self.measured - 1.0)


def fit_compute(packs: Sequence[PackSeconds]) -> Fit:
    """Fit the constants of compute to packs on single ranks. MeasureError: these do not separate them."""
    amounts = np.array([pack.amounts[0] for pack in packs]).reshape(-1, len(TERMS))
    seconds = np.array([pack.busy_s for pack in packs])
    used = np.any(amounts > 0, axis=0)
    distinct = len(np.unique(amounts, axis=0))
    if distinct < used.sum() + SPARE:
        raise MeasureError(f"{distinct} different packs were measured; allowed: at least {int(used.sum()) + SPARE} for "
                           f"the {int(used.sum())} constants {', '.join(np.array(TERMS)[used])}")
    solved = bounded_least_squares(amounts / seconds[:, None], np.ones(len(seconds)))
    constants = dict(zip(TERMS, solved.tolist()))
    if constants["quadratic_s"] + constants["linear_s"] == 0.0:
        raise MeasureError(f"{len(packs)} packs were measured, and those of more tokens took no longer; allowed: "
                           "packs that do, as on a machine that others use less")
    parts = amounts * solved
    predicted = parts.sum(axis=1)
    share = parts / np.maximum(predicted[:, None], 1e-300)
    errors = np.abs(predicted / seconds - 1.0) @ share / np.maximum(share.sum(axis=0), 1e-12)
    return Fit(constants, dict(zip(np.array(TERMS)[used].tolist(), errors[used].tolist())), predicted, seconds)


def fixed_of_micro_batch(packs: Sequence[PackSeconds], compute: Fit) -> float:
    """Seconds that gathering and reducing add once per micro-batch, by packs with images if there are any: the encoder
    is gathered if any rank has an image.
    """
    alone = [pack for pack in packs if pack.degree == 1]
    of_images = [pack for pack in alone if pack.has_images] or alone
    whole = np.array([pack.whole_s for pack in of_images])
    above = np.maximum(0.0, whole - np.array([compute.seconds(pack) for pack in of_images]))
    return weighted_median(above, 1.0 / whole)


class Links(NamedTuple):
    """Bytes per second by degree, inside nodes and across them (empty: not measured)."""

    intra: dict[int, float]
    inter: dict[int, float]


def fit_links(by_rank: Sequence[Sequence[Exchanged]]) -> Links:
    """Fit bandwidths to the median message times of all ranks in each kind of ring."""
    points: dict[tuple[bool, int], list[tuple[int, float]]] = {}
    for ring in sorted((ring for rings in by_rank for ring in rings), key=lambda ring: (ring.across, ring.degree)):
        points.setdefault((ring.across, ring.degree), []).extend(ring.seconds.items())
    links = Links({}, {})
    for (across, degree), alike in points.items():
        size, seconds = np.array(alike, dtype=np.float64).T
        found = bounded_least_squares(np.stack([1.0 / seconds, size / seconds], 1), np.ones(len(size)))
        links[across][degree] = 1.0 / max(float(found[1]), 1e-15)
    return links


def fit_ring(
    packs: Sequence[PackSeconds], compute: Fit, bytes_per_token: float, links: Links, gathers_s: float | None = None,
    known: Fit | None = None, window_s: float = 0.0,
) -> Fit:
    """Fit `slowness`, `overlap` and `latency_s` to packs on several ranks: of the points of a grid as good as the best,
    that with the least slowness, then overlap. `gathers_s`: seconds that a micro-batch adds to its packs; None:
    sync=step. `known`: the other mode's fit, which has the same slowness and overlap.
    """
    degree = np.array([pack.degree for pack in packs], dtype=np.float64)
    whole = np.array([pack.together_s if gathers_s is None else max(pack.busy_s, pack.whole_s - gathers_s)
                      for pack in packs])
    bandwidth = np.array([links[pack.across][pack.degree] for pack in packs])
    transfer = (degree - 1) / degree * bytes_per_token * np.array([pack.tokens for pack in packs]) / bandwidth
    own_s = np.array([compute.seconds(pack) for pack in packs]) + window_s
    attention = compute.constants["quadratic_s"] * np.array([pack.amounts[0, 0] for pack in packs])
    hidden = (degree - 1) / degree * attention

    def fitted(slowness: float, overlap: float) -> tuple[float, Fit]:
        exposed = own_s + np.maximum(0.0, slowness * transfer - overlap * hidden)
        latency = weighted_median((whole - exposed) / (degree - 1), (degree - 1) / whole)
        constants = {"slowness": slowness, "overlap": overlap, "latency_s": max(0.0, latency)}
        predicted = exposed + constants["latency_s"] * (degree - 1)
        return float((np.abs(predicted - whole) / whole).sum()), Fit(constants, {}, predicted, whole)

    if known:
        return fitted(known.constants["slowness"], known.constants["overlap"])[1]
    points = [fitted(slowness, overlap) for slowness in SLOWNESS.tolist() for overlap in OVERLAP.tolist()]
    least = min(off for off, _ in points)
    return next(fit for off, fit in points if off <= AS_GOOD * least + 1e-12)
