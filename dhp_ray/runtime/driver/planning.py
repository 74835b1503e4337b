"""The planning of one step: which thread sends its plan, and how long the driver waits for it.

    planning thread   |---- plan n+1 by planner.name ----|  claim: send    the first to claim sends, the other does not
    driver            results of n | last resort n+1 | wait ... | claim: send it
"""

from __future__ import annotations

import statistics
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dhp_ray.data.stream import Batch
    from dhp_ray.planner.cost import CostModel
    from dhp_ray.planner.plan import Plan
    from dhp_ray.runtime.driver.stages import DispatchedStep

LATE_S = 0.01
"""The shortest time that the driver waits for a plan."""

RECENT = 50
"""The number of plans whose distance from the lower bound predicts that of the next one."""


@dataclass
class Planning:
    """One step's planning, shared by the planning thread and the driver: speeds, pool and cost are as when it begins.
    """

    step: int
    speeds: tuple[float, ...]
    pool: list[tuple[int, ...]]
    cost: CostModel
    reading: Future[Batch | None] = field(init=False)
    ahead: Future[DispatchedStep | None] = field(init=False)
    sends_ahead: bool = False
    """The planning thread was the first to claim it: it sends the plan, or has sent it."""
    _claimed: bool = False
    _lock: Lock = field(default_factory=Lock)

    @property
    def claimed(self) -> bool:
        return self._claimed

    def claim(self, ahead: bool = False) -> bool:
        """Return whether the caller is the first to claim the planning: only the first may send a plan of this step (or
        make sure that none is sent).

        ahead: the caller is the planning thread.
        """
        with self._lock:
            first, self._claimed = not self._claimed, True
            self.sends_ahead = self.sends_ahead or (first and ahead)
            return first


@dataclass(frozen=True)
class Patience:
    """How long a plan is worth waiting for, from `since_s` on: as long as waiting costs less than running the last
    resort.
    """

    since_s: float
    seconds: float

    def over(self) -> bool:
        return monotonic() - self.since_s >= self.seconds


@dataclass
class Expectation:
    """The expected makespan of the planner's next plan, from how far the last ones were above their lower bounds."""

    over_bound: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def observe(self, plan: Plan) -> None:
        self.over_bound.append(plan.predicted_time_s / plan.lower_bound_s)

    def makespan_s(self, lower_bound_s: float) -> float:
        """Return the predicted seconds of a plan for a batch with this bound."""
        return lower_bound_s * (statistics.median(self.over_bound) if self.over_bound else 1.0)


def patience_s(last_resort_s: float, expected_s: float, scale: float | None) -> float:
    """Return the seconds that ranks may wait for a plan before the last resort is taken: what they would lose by
    running the last resort instead.

    By then waiting has cost as much as the loss, so both together cost at most twice what the best choice would have
    cost if it were known when the planner ends.

    last_resort_s, expected_s: predicted makespans of the last resort and of the plan that is waited for. scale:
    measured over predicted seconds, None while no step has been measured; then the driver waits for the plan however
    long it takes.
    """
    return float("inf") if scale is None else max(LATE_S, scale * (last_resort_s - expected_s))
