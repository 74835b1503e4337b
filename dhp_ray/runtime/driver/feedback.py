"""What measured steps tell a run. Nothing here calls a worker.

    SpeedMeter     how fast each rank is            -> speeds in the next plans, ranks to be replaced
    CostRefits     what packs take on these devices -> costs in the next plans
    Mirroring      how long copies of state take    -> after which steps they are made
    TimeScale      measured over predicted seconds  -> how long to wait for a plan or a rank
    Expectation    how far plans are from the bound -> how long the next plan is worth waiting for

A rank's slowdown is its unblocked seconds over the nominal compute seconds of the packs that it ran: neither long packs
nor waiting for others change it. A rank's speed is the group's typical slowdown over its own, so a machine that is slow
as a whole, or a cost file that is off, makes no rank slow. The planner divides a pack's work by the speed, but not what
each pack pays once (launches), so it is told the speed of the work alone: a rank with 5 s of work and 1 s paid once
that is busy for 11 s is reported with speed 6/11, and planned with 5/10.

With `elastic.mirror_every_steps=auto`, copies of the state may take COPY_SHARE of the run's time: if those of one
version take c seconds and a step s, they are made every ceil(c / (COPY_SHARE s)) steps. All of c is counted: a copy
travels while steps run, but may take cores and links from them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dhp_ray.config import Config
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.refit import FAR, Observed, Refit, refit, with_factors
from dhp_ray.planner.cost.work import TERMS, Work
from dhp_ray.planner.plan.types import Plan
from dhp_ray.schema import MAX_MIRROR_STEPS
from dhp_ray.train.results import StepResult

SPEED_DECAY = 0.5  # the weight of the last step's sums in the next
NOMINAL_FROM = 0.85  # at this speed and above, a rank counts as one of nominal speed, so that plans do not follow noise

GRAIN = 0.05
"""Lower speeds are rounded for the planner to multiples of this, from one half down of half of it, and so on."""

SLOW_BELOW = 0.7
SLOW_STEPS = 5  # a rank counts as slow, and is reported, after SLOW_STEPS steps in a row below SLOW_BELOW

FORGET_AFTER = 10
"""After this many steps without a pack, a rank counts as one of nominal speed: it gets a pack, and is measured."""


@dataclass
class _Rank:
    nominal_s: float = 0.0
    busy_s: float = 0.0
    once_s: float = 0.0
    unseen: int = 0
    below: dict[float, int] = field(default_factory=dict)


class SpeedMeter:
    """The speeds of one generation's ranks; `measured`: of each, 1.0 is the group's typical one. One below
    `evict_below` for `patience` steps should be replaced.
    """

    def __init__(self, num_ranks: int, evict_below: float = 0.0, patience: int = 20) -> None:
        self.evict_below, self.patience = evict_below, patience
        self.measured = (1.0,) * num_ranks
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._typical = 1.0
        self._reported: set[int] = set()

    def observe(self, nominal_s: Sequence[float], busy_s: Sequence[float], once_s: Sequence[float] = ()) -> None:
        """Take in one step: seconds by rank. `once_s`: the part of `nominal_s` that packs pay once (empty: none)."""
        for rank, nominal, busy, once in zip(self._ranks, nominal_s, busy_s, once_s or [0.0] * len(busy_s),
                                             strict=True):
            if nominal > 0 and busy > 0:
                rank.nominal_s = SPEED_DECAY * rank.nominal_s + nominal
                rank.busy_s = SPEED_DECAY * rank.busy_s + busy
                rank.once_s = SPEED_DECAY * rank.once_s + once
                rank.unseen = 0
            else:
                rank.unseen += 1
                if rank.unseen >= FORGET_AFTER:
                    rank.nominal_s = rank.busy_s = rank.once_s = 0.0
        slowdowns = sorted(rank.busy_s / rank.nominal_s for rank in self._ranks if rank.nominal_s > 0)
        self._typical = typical = slowdowns[(len(slowdowns) - 1) // 2] if slowdowns else 0.0  # the lower median
        self.measured = tuple(
            typical * rank.nominal_s / rank.busy_s if rank.busy_s > 0 else 1.0 for rank in self._ranks)
        for rank, speed in zip(self._ranks, self.measured):
            passed = [limit for limit in (SLOW_BELOW, self.evict_below) if speed < limit]
            rank.below = {limit: rank.below.get(limit, 0) + 1 for limit in passed}

    def planned(self) -> tuple[float, ...]:
        """The speeds to plan with: those of the packs' work, without what they pay once."""
        return tuple(1.0 if speed >= NOMINAL_FROM else _told(self._work_speed(rank))
                     for rank, speed in zip(self._ranks, self.measured))

    def _work_speed(self, rank: _Rank) -> float:
        """Return the speed of a slow rank's work; its busy seconds are more than what its packs pay once."""
        return self._typical * (rank.nominal_s - rank.once_s) / (rank.busy_s - self._typical * rank.once_s)

    def slow(self) -> set[int]:
        """Return the ranks that have been slow for SLOW_STEPS steps or more."""
        return {place for place, rank in enumerate(self._ranks) if rank.below.get(SLOW_BELOW, 0) >= SLOW_STEPS}

    def news(self) -> dict[int, bool]:
        """Return the ranks that have become slow (True) or are no longer slow (False) since the last call."""
        slow, reported = self.slow(), self._reported
        self._reported = slow
        return {rank: rank in slow for rank in sorted(slow ^ reported)}

    def no_good(self) -> tuple[int, ...]:
        """Return the ranks that should be replaced."""
        return tuple(place for place, rank in enumerate(self._ranks)
                     if rank.below.get(self.evict_below, 0) >= self.patience)


def _told(speed: float) -> float:
    grain = GRAIN * 2.0 ** (1 + math.floor(math.log2(speed)))
    return round(speed / grain) * grain


def busy_s(results: Sequence[StepResult], num_ranks: int) -> list[float]:
    """Unblocked seconds of each rank's packs and encoder phases; 0 for a rank that has not reported."""
    seconds = [0.0] * num_ranks
    for result in results:
        seconds[result.rank] = sum(time.busy_s for time in result.times)
    return seconds


WINDOW = 16  # the number of last steps whose packs are used
REFIT_DECAY = 0.75  # the factor by which the weight of a step's packs falls with each later step
MOST_ROWS = 512  # the most rows of a step that are kept; if it has more, only every second, third, ... one is kept

HIGH, STEPS_TO_STAY = 0.1, 4
"""The typical error from which measured costs are refitted, and the steps that show it: the first ones pay for more."""

Terms = dict[str, float]


def least_error(config: Config, cost: CostModel) -> float:
    """Return the typical error from which a run's costs are refitted (inf: never). For costs that were measured for it
    that is HIGH: ranks may have to share cores or links that were free then. A deterministic run keeps its plans.
    """
    return math.inf if config.train.deterministic else 0.0 if cost.estimated else HIGH


@dataclass
class CostRefits:
    """The refits of one run, over all its generations. Plan files and checkpoints record the costs in force, with which
    a resumed run goes on.
    """

    prior: CostModel | None = None
    factors: Terms = field(default_factory=dict)
    on: bool = False
    least_error: float = 0.0
    _recorded: tuple[Terms, Terms | None] | None = None
    _num_observed: int = 0
    _window: deque[Observed] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def cost(self) -> CostModel:
        """The costs in force."""
        assert self.prior is not None
        return with_factors(self.prior, self.factors)

    def enter(self, prior: CostModel, least_error: float = 0.0) -> CostModel:
        """Begin a generation with these costs; returns those in force. Observations are kept if the constants are the
        same; factors are kept even if not: they describe the device.
        """
        on = math.isfinite(least_error)
        if self._recorded and on:
            terms, of = self._recorded
            self.factors = _factors(terms, prior) if of is None or of == _terms(prior) else {}
        self._recorded = None
        if self.prior is None or _terms(self.prior) != _terms(prior) or not on:
            self._window.clear()
        self.prior, self.on, self.least_error = prior, on, least_error
        self.factors = self.factors if on else {}
        return self.cost

    def restore(self, terms: Mapping[str, float], prior: Mapping[str, float] | None = None) -> None:
        """Let the next generation go on with recorded terms; if `prior` is given, only if its own prior is the same."""
        if terms:
            self._recorded = dict(terms), None if prior is None else dict(prior)

    def observe(self, work: Work, busy_s: np.ndarray) -> Refit | None:
        """Take in a step's packs but those that wait for copies to the host; returns the refit if there is one."""
        if not self.on or self.prior is None:
            return None
        busy_s = np.where(work.waits_s > 0, np.nan, busy_s)
        every = max(1, math.ceil(len(busy_s) / MOST_ROWS))
        first, self._num_observed = self._num_observed % every, self._num_observed + 1  # phases alternate
        rows = [array[first::every] for array in (work.rank, work.amounts, busy_s, np.ones(len(busy_s)))]
        self._window = deque((seen._replace(weight=REFIT_DECAY * seen.weight) for seen in self._window), maxlen=WINDOW)
        self._window.append(Observed(*rows).usable())
        if self.least_error and len(self._window) < STEPS_TO_STAY:
            return None
        found = refit(self.prior, self.factors, Observed(*map(np.concatenate, zip(*self._window))))
        if not found or found.error_before < self.least_error:
            return None
        self.factors = found.factors
        return found

    def to_json(self) -> dict[str, Terms]:
        """Return what a checkpoint stores: the terms in force and their prior; empty if nothing is refitted."""
        if not self.on or self.prior is None:
            return {}
        return {"terms": _terms(self.cost), "prior": _terms(self.prior)}


def _terms(cost: CostModel) -> Terms:
    return {name: getattr(cost, name) for name in TERMS}


def _factors(terms: Terms, prior: CostModel) -> Terms:
    """Return the factors that turn a prior into `terms`; none if one is out of bounds: `terms` are of another cost."""
    of = _terms(prior)
    found = {name: terms[name] / of[name] for name in TERMS if of[name] > 0 and name in terms}
    return found if all(1 / FAR <= factor <= FAR for factor in found.values()) else {}


COPY_SHARE = 0.02  # the largest share of a step's time that copies may take

RECENT_COPIES = 8
"""The last copies of a rank of which the fastest counts: in slower ones, it waited for a peer or a core."""


def steps_between(copy_s: float, step_s: float, current: int) -> int:
    """Return the steps from one copy of the state to the next. `current` falls by a third or more, to a number that
    still suffices if copies take half as long again.
    """
    share = copy_s / (COPY_SHARE * step_s)
    needed, ample = (min(MAX_MIRROR_STEPS, max(1, math.ceil(room * share))) for room in (1.0, 1.5))
    return needed if needed > current else ample if 3 * ample <= 2 * current else current


class Mirroring:
    """Says after which steps the state is mirrored, over all generations of a run."""

    def __init__(self, setting: str) -> None:
        """`setting`: the value of `elastic.mirror_every_steps`."""
        self.auto = setting == "auto"
        self.every = 1 if self.auto else int(setting)
        self.enter()

    def enter(self) -> None:
        """Begin a new generation, with other ranks and links. With auto its first step is mirrored, and measured."""
        self.last: int | None = None  # the last step after which copies have begun
        self._copies: list[deque[float]] = []

    def due(self, step: int) -> bool:
        if self.auto:
            return self.last is None or step - self.last >= self.every
        return self.every > 0 and step % self.every == 0

    @property
    def copy_s(self) -> float:
        """Seconds that the slowest rank takes for the copies of one version; 0 if unknown."""
        return max((min(copies) for copies in self._copies if copies), default=0.0)

    def observe(self, seconds: Sequence[Sequence[float]], step_s: float) -> bool:
        """Note how long each rank's copies took since the last call, and a step; return whether `every` has changed."""
        if not self._copies:
            self._copies = [deque(maxlen=RECENT_COPIES) for _ in seconds]
        for copies, added in zip(self._copies, seconds, strict=True):
            copies.extend(added)
        before = self.every
        if self.auto and self.copy_s and step_s > 0:
            self.every = steps_between(self.copy_s, step_s, before)
        return self.every != before


class TimeScale:
    """The running median of measured over predicted makespan: how long the driver waits for a plan or a rank."""

    def __init__(self, window: int = 50) -> None:
        self.window = window
        self.ratios: list[float] = []

    def known(self) -> float | None:
        """The median, None before the first observation."""
        return statistics.median(self.ratios) if self.ratios else None

    def rescale(self, factor: float) -> None:
        """Note that predictions are from now on `factor` times what they were."""
        self.ratios = [ratio / factor for ratio in self.ratios]

    def observe(self, measured_s: float, predicted_s: float) -> None:
        if measured_s > 0 and predicted_s > 0:
            self.ratios = [*self.ratios, measured_s / predicted_s][-self.window :]


LATE_S = 0.01  # the shortest time that the driver waits for a plan
RECENT_PLANS = 50  # the number of plans whose distance from the lower bound predicts that of the next one


@dataclass
class Expectation:
    """The expected makespan of the planner's next plan, from how far the last ones were above their lower bounds."""

    over_bound: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_PLANS))

    def observe(self, plan: Plan) -> None:
        self.over_bound.append(plan.predicted_time_s / plan.lower_bound_s)

    def makespan_s(self, lower_bound_s: float) -> float:
        """Return the predicted seconds of a plan for a batch with this bound."""
        return lower_bound_s * (statistics.median(self.over_bound) if self.over_bound else 1.0)


def patience_s(last_resort_s: float, expected_s: float, scale: float | None) -> float:
    """Return the seconds that ranks may wait for a plan: what they would lose by running the last resort instead, so
    that waiting and loss cost at most twice the best choice. `scale`: measured over predicted; None: wait without end.
    """
    return float("inf") if scale is None else max(LATE_S, scale * (last_resort_s - expected_s))
