"""The planning of one step: who sends its plan, and how long a plan is waited for.

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
"""A plan is waited for so long at least."""

RECENT = 50
"""Plans whose distance from the lower bound says what the next one will be."""


@dataclass
class Planning:
    """One step's planning, held by the planning thread and the driver: speeds, pool and cost as when it begins."""

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
        """Whether the caller is the first to ask: only that one may send a plan of this step (or see to it that none is
        sent).

        ahead: the caller is the planning thread.
        """
        with self._lock:
            first, self._claimed = not self._claimed, True
            self.sends_ahead = self.sends_ahead or (first and ahead)
            return first


@dataclass(frozen=True)
class Patience:
    """How long a plan is worth waiting for, from `since_s` on: while that costs less than running the last resort."""

    since_s: float
    seconds: float

    def over(self) -> bool:
        return monotonic() - self.since_s >= self.seconds


@dataclass
class Expectation:
    """What the planner's next plan will come to, by how far above their lower bounds the last ones did."""

    over_bound: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def observe(self, plan: Plan) -> None:
        self.over_bound.append(plan.predicted_time_s / plan.lower_bound_s)

    def makespan_s(self, lower_bound_s: float) -> float:
        """Predicted seconds of a plan of a batch with this bound."""
        return lower_bound_s * (statistics.median(self.over_bound) if self.over_bound else 1.0)


def patience_s(last_resort_s: float, expected_s: float, scale: float | None) -> float:
    """Seconds that ranks may wait for a plan before the last resort is taken: what they would lose by running that
    instead.

    By then waiting has cost as much as the loss, so both together cost at most twice what knowing the planner's end
    would have.

    last_resort_s, expected_s: predicted makespans of the last resort and of the plan that is waited for. scale:
    measured over predicted seconds, None while no step has been measured; then the plan is waited for however long it
    takes.
    """
    return float("inf") if scale is None else max(LATE_S, scale * (last_resort_s - expected_s))
