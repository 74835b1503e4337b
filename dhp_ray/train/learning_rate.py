"""The learning rate over the steps of a run, as a factor of the peak."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "constant")


def learning_rate_factor(
    step: int, total_steps: int, warmup_steps: int, schedule: str = "cosine", minimum: float = 0.0
) -> float:
    """Factor (0 to 1) of the peak learning rate at `step`, counted from 1.

        step     1 ... warmup_steps     warmup_steps + 1 ............ total_steps, and after
        factor   rises evenly above 0   1 ... half a cosine down ... `minimum`

    `schedule` "constant" stays at 1 after the warm-up. SGDR, arXiv 1608.03983, equation 5, without restarts.

    Raises:
        ValueError: unknown schedule, or a step below 1.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}; allowed: {', '.join(SCHEDULES)}")
    if step < 1:
        raise ValueError(f"step: got {step}; steps are counted from 1")
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps - 1) / max(1, total_steps - warmup_steps - 1))
    return minimum + (1.0 - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))
