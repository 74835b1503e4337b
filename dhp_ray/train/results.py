"""What a rank reports about a step: the times of its packs, and the step's sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dhp_ray.planner.cost.work import BACKWARD, ENCODE, Work


class PackTime(NamedTuple):
    """When a rank ran a pack, in seconds from its start of the step; `blocked_s` was spent waiting for peers."""

    index: int  # type: ignore[assignment]  # in place of a tuple's method
    start_s: float
    end_s: float
    blocked_s: float

    @property
    def busy_s(self) -> float:
        """Seconds that were not spent waiting."""
        return self.end_s - self.start_s - self.blocked_s


class ExpertsUsed(NamedTuple):
    """How evenly a step used the experts of a layer. `entropy`: of the shares of its tokens, over that of equal ones,
    the mean of all layers. `max_load`: tokens of the fullest expert over the mean, in the worst layer.
    """

    entropy: float
    max_load: float

    @classmethod
    def of(cls, counts: np.ndarray) -> ExpertsUsed | None:
        """Of the tokens (layers, experts) at each; None if there are none."""
        shares = counts[counts.sum(1) > 0]
        if not len(shares):
            return None
        shares = shares / shares.sum(1, keepdims=True)
        entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1) / np.log(max(2, shares.shape[1]))
        return cls(float(entropy.mean()), float(shares.max() * shares.shape[1]))


class StepResult(NamedTuple):  # tuples: the driver unpickles one of each rank at every step
    """What one rank reports about one step: `plan_id` is the plan that it ran. Sums are global: equal on all ranks."""

    step: int
    rank: int
    loss_sum: float
    num_valid_tokens: int
    gradient_norm: float
    learning_rate: float
    applied: bool
    state_version: int
    step_time_s: float
    data_wait_s: float
    pack_times: tuple[PackTime, ...]
    pool: dict[str, int]
    saved_steps: tuple[int, ...] = ()
    save_error: str = ""
    plan_id: str = ""
    encoder_times: tuple[PackTime, ...] = ()
    """The times of the phases before and after the packs, if images are encoded apart from them."""
    exchanged_bytes: int = 0
    """Bytes of features that this rank sent to others in the first phase."""
    moved_bytes: int = 0
    """Bytes of activations that went to host memory and came back."""
    experts: ExpertsUsed | None = None
    """Of all ranks; None without experts."""

    @property
    def times(self) -> tuple[PackTime, ...]:
        return *self.pack_times, *self.encoder_times


def last_end_s(results: Sequence[StepResult]) -> float:
    """Return when the last pack or encoder phase ends, on its rank's clock."""
    return max((time.end_s for result in results for time in result.times), default=0.0)


def busy_s_of(work: Work, results: Sequence[StepResult]) -> np.ndarray:
    """Return the measured seconds of each row of a plan's work, without waits; NaN if no rank has reported it."""
    found = {(result.rank, time.index): time.busy_s for result in results for time in result.pack_times}
    found |= {(result.rank, phase): time.busy_s for result in results
              for phase, time in zip((ENCODE, BACKWARD), result.encoder_times)}
    rows = zip(work.rank.tolist(), work.group.tolist())
    return np.array([found.get(row, np.nan) for row in rows], dtype=np.float64)
