"""What the driver tells the job's process, and the errors that end a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class RunError(RuntimeError):
    """A failure that ends the run; the message is one line for the user."""


@dataclass(frozen=True)
class Started:
    """The run is about to take its first step (or the first after a resume)."""

    lines: tuple[str, ...]
    first_step: int
    total_steps: int


@dataclass(frozen=True)
class StepDone:
    """A step is committed. `metrics` is its line in metrics.jsonl, `extra` what only the console and TensorBoard show."""

    metrics: dict[str, Any]
    extra: dict[str, Any]


@dataclass(frozen=True)
class Notice:
    """A line that the user should see: a sample left out, a save that failed."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The run is over. `error` is empty when all went well; `status` is the exit status of the job."""

    text: str
    error: str = ""
    status: int = 0


Message = Started | StepDone | Notice | Finished
