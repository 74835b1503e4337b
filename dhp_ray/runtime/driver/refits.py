"""The costs that a run plans with: those that it began with, refitted to measured packs.

    commit n     seconds of step n's packs --> refit --> the cost in force
    begin n + 2  the next step whose planning begins takes it

The costs in force are written to the plan file of each step and to each checkpoint, so a resumed run goes on with them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dhp_ray.config import Config
from dhp_ray.planner.cost import CostModel
from dhp_ray.planner.refit import FAR, Observed, Refit, refit, with_factors
from dhp_ray.planner.work import TERMS, Work

WINDOW = 16
"""The number of last steps whose packs are used."""
DECAY = 0.75
"""The factor by which the weight of a step's packs falls with each later step."""
MOST_ROWS = 512
"""The most rows of a step that are kept; if it has more, only every second, third, ... one is kept."""

HIGH, STEPS_TO_STAY = 0.1, 4
"""The typical error of measured costs from which they are refitted, and the number of steps that it must be seen in:
the first ones pay for more than their packs.
"""

Terms = dict[str, float]


def least_error(config: Config, cost: CostModel) -> float:
    """Return the typical error from which a run's costs are refitted (inf: never), as `planner.refit` says; with auto,
    costs that were measured for this run are refitted where their error stays HIGH: ranks may have to share cores or
    links that were free then. A deterministic run keeps its costs, and so its plans.
    """
    if config.planner.refit == "auto":
        return math.inf if config.train.deterministic else 0.0 if cost.estimated else HIGH
    return 0.0 if config.planner.refit == "true" else math.inf


@dataclass
class CostRefits:
    """The refits of one run, over all its generations."""

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
        """Begin a generation whose costs are `prior`; returns the costs in force. They are refitted from a typical
        error of `least_error` on; inf: never. Observations are kept if the constants are the same as before; if costs
        are refitted, factors are kept even if they are not, because they describe the device.
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
        """Take in a step's packs, except those that wait for copies to host memory, because that wait is unknown;
        returns the refit if anything has changed.
        """
        if not self.on or self.prior is None:
            return None
        busy_s = np.where(work.waits_s > 0, np.nan, busy_s)
        every = max(1, math.ceil(len(busy_s) / MOST_ROWS))
        first, self._num_observed = self._num_observed % every, self._num_observed + 1  # phases alternate
        rows = [array[first::every] for array in (work.rank, work.amounts, busy_s, np.ones(len(busy_s)))]
        self._window = deque((seen._replace(weight=DECAY * seen.weight) for seen in self._window), maxlen=WINDOW)
        self._window.append(Observed(*rows).usable())
        if self.least_error and len(self._window) < STEPS_TO_STAY:
            return None
        found = refit(self.prior, self.factors, Observed(*map(np.concatenate, zip(*self._window))))
        if not found or found.error_before < self.least_error:
            return None
        self.factors = found.factors
        return found

    def to_json(self) -> dict[str, Terms]:
        """Return what a checkpoint stores: the terms in force and the prior that they come from; empty if nothing is
        refitted.
        """
        if not self.on or self.prior is None:
            return {}
        return {"terms": _terms(self.cost), "prior": _terms(self.prior)}


def _terms(cost: CostModel) -> Terms:
    return {name: getattr(cost, name) for name in TERMS}


def _factors(terms: Terms, prior: CostModel) -> Terms:
    """Return the factors that turn a prior into `terms`; none if one is out of bounds: then the terms are those of
    another cost.
    """
    of = _terms(prior)
    found = {name: terms[name] / of[name] for name in TERMS if of[name] > 0 and name in terms}
    return found if all(1 / FAR <= factor <= FAR for factor in found.values()) else {}
