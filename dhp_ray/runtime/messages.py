"""What the driver tells the workers and the job's process, and the errors that end a run. Neither torch nor Ray here: the console needs none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ray


class RunError(RuntimeError):
    """A failure that ends the run; the message is one line for the user."""


@dataclass(frozen=True)
class Membership:
    """A rank's place in one generation of the group, and the store where the generation meets."""

    rank: int
    world_size: int
    generation: int
    store_host: str
    store_port: int


@dataclass
class BlockRows:
    """Rows of one block in the object store. The reference is nested in a list, so that Ray hands it on unresolved."""

    reference: list[ray.ObjectRef] = field(repr=False)
    rows: list[int]


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
