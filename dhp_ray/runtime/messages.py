"""The messages between driver, workers and the job's process, and the errors that end a run. Neither torch nor Ray."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dhp_ray.credentials import MOST_OF_ERROR, shown
from dhp_ray.errors import first_line_of

if TYPE_CHECKING:
    from dhp_ray.config import Config
    from dhp_ray.planner.mode import Mode
    from dhp_ray.train.results import StepResult


class RunError(RuntimeError):
    """A failure that ends the run; the message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(shown(message, MOST_OF_ERROR))


class GroupError(RunError):
    """A worker died, raised or no longer answers. During training, a new generation forms; before, this ends the run.
    `unresponsive`: the ranks that have just failed to answer a query. `rank`: whose own call failed (None: none did).
    """

    def __init__(self, text: str, unresponsive: Sequence[int] = (), rank: int | None = None) -> None:
        super().__init__(text)
        self.unresponsive, self.rank = tuple(unresponsive), rank


def words_of(error: BaseException) -> str:
    """Return one line: the error's own words if they are for the user, else its type, words and place."""
    text = first_line_of(str(error))
    if isinstance(error, (ValueError, OSError, RunError)) and text:
        return text
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/dhp_ray/" in frame.filename]
    place = f" (at {Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {text}{place}"


def death_of(error: BaseException) -> str:
    """Return in one line what Ray says of an actor's death: what its constructor raised, or why its process ended."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # what follows the indented lines: the constructor's frames, the last of which raised, or the actor's properties
    found = [line for before, line in pairwise(lines) if before[0].isspace() and not line[0].isspace()] or lines
    return shown(found[-1 if getattr(error, "actor_init_failed", False) else 0].rpartition("Worker exit detail: ")[2])


class StoppingError(Exception):
    """A wait has ended early: the run has been asked to end and needs nothing more."""


@dataclass(frozen=True)
class Membership:
    """A rank's place in one generation, and the address of the rendezvous store. `replica_ranks`: who holds each rank's
    replica (empty: none). `pool_groups`: process groups that every rank keeps (0: as many as this device holds).
    `mode`: for keys that are auto (None: PLAIN). `nodes`: of each rank, by any name (empty: one).
    """

    rank: int
    world_size: int
    generation: int
    store_host: str
    store_port: int
    replica_ranks: tuple[int, ...] = ()
    pool_groups: int = 0
    mode: Mode | None = None
    nodes: tuple[str, ...] = ()

    def mode_in(self, config: Config) -> Mode:
        """Return how the rank trains: as configured, and where the configuration says auto, as `mode` says."""
        from dhp_ray.planner.mode import ALLOWED, PLAIN, Mode  # brings numba, which a refused run has no time for

        chosen = self.mode or PLAIN
        sync, again, shared = (config.planner.sync, config.train.activation_checkpointing,
                               config.train.expert_parallel)
        return Mode(chosen.sync if sync == "auto" else sync,
                    chosen.recomputes if again == "auto" else ALLOWED.get(again, (again,))[0],
                    chosen.expert_parallel if shared == "auto" else int(shared))


class StepOrder(NamedTuple):
    """The order to run a step's plan, which all ranks have prefetched. `placeholders`: samples whose labels are all
    masked, with reasons. `schedule_step`: the learning rate's. `mirrors`: the state is copied afterwards.
    """

    step: int
    plan_id: str
    placeholders: dict[str, str]
    schedule_step: float
    total_steps: int
    mirrors: bool


@dataclass(frozen=True)
class FromCheckpoint:
    """Begin with a checkpoint's state, or with fresh weights (no name)."""

    name: str = ""


@dataclass(frozen=True)
class FromMemory:
    """Begin with the workers' state of an earlier generation. `owners`: the shards that this worker supplies."""

    generation: int
    version: int
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class HeldShards:
    """The complete shard versions of one generation that a worker holds: {owner: versions}."""

    generation: int
    world_size: int
    versions: Mapping[int, Sequence[int]]


class Ran(NamedTuple):
    """A step that a worker ran."""

    result: StepResult
    placeholders: dict[str, str]


@dataclass(frozen=True)
class Status:
    """A worker's report on itself; without one it is `dead`, or has not `answered`. `call`: of its training thread
    (empty: idle); `last_mark`: passed last, in words; `mark_id`: the call with that mark's number (idle: the images
    that it has decoded). `error`: it raised, unless a peer's loss was the cause, or why it is dead. Only of an idle
    one: `held`; `ran`: its last steps; `steps`: the last step that left each state version.
    """

    generation: int = 0
    call: str = ""
    last_mark: str = ""
    waits_for_peers: bool = False
    mark_id: str = ""
    error: str = ""
    held: tuple[HeldShards, ...] = ()
    ran: dict[int, Ran] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    dead: bool = False
    answered: bool = True


@dataclass(frozen=True)
class RunStarted:
    """The run is about to take its first step (or the first after a resume)."""

    lines: tuple[str, ...]
    first_step: int
    total_steps: int


@dataclass(frozen=True)
class StepCommitted:
    """A step is committed. `metrics` is its line in metrics.jsonl."""

    metrics: dict[str, Any]


@dataclass(frozen=True)
class Notice:
    """A line that the user should see: a sample left out, a save that failed."""

    text: str


@dataclass(frozen=True)
class Replace:
    """The worker of a slot is lost or unusable: the job's process ends it and starts another one in its place."""

    slot: int


@dataclass(frozen=True)
class RunFinished:
    """The run is over. `error` is empty when all went well; `status` is the exit status of the job."""

    text: str
    error: str = ""
    status: int = 0


Message = RunStarted | StepCommitted | Notice | Replace | RunFinished
Tell = Callable[[Message], None]
"""Sends a message to the job's process; any thread may call it."""
