"""The workers of one generation: calls to all of them, one clear error when one fails, and polls of their health."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from dhp_ray.data.blocks import unnoticed
from dhp_ray.planner.mode import Mode
from dhp_ray.planner.plan.types import RankPlan
from dhp_ray.runtime.driver.elastic import Condition, ProgressWatchdog, condition_of
from dhp_ray.runtime.messages import GroupError, Membership, Status, StoppingError, death_of, words_of
from dhp_ray.runtime.rank_slices import RowIndex, packed_slice
from dhp_ray.runtime.strategy import Ranks
from dhp_ray.runtime.waits import Waits

SURVEY_S = 4.0  # how long the control thread of a worker may take to answer
GATHER_S = 0.002  # answers this soon after the first are taken with it: each wait scans all that are pending
GRACE_S = 5.0  # when a rank is killed, its peers raise first; Ray learns of its death a little later
AGAIN_S = 0.3  # how long before its node is looked at, or after it has failed to answer for SURVEY_S
IDLE_LOOK_S = 1.0  # seconds between health checks of workers that wait for data and have no call that would fail
STOP_POLL_S = 0.2  # seconds between two checks whether the run is to end, in a wait that ends with it

WORDS = {Condition.DEAD: "died", Condition.UNRESPONSIVE: "answers no more", Condition.STUCK: "is stuck",
         Condition.RAISED: "raised", Condition.SLOW: "is too slow",
         Condition.DRAINED: "is on a node that is being drained"}


@dataclass
class WorkerHandle:
    """A worker: the slot of the job's process that it fills, its actor, and its description of itself."""

    slot: int
    actor: ActorHandle
    described: dict[str, Any] = field(default_factory=lambda: {"pid": 0, "node_id": "?"})

    @property
    def place(self) -> str:
        return f"pid {self.described['pid']} on node {str(self.described['node_id'])[:8]}"


def by_node(members: Sequence[WorkerHandle]) -> list[WorkerHandle]:
    """Sort members into rank order: a node's ranks are neighbours; nodes and members otherwise keep their order."""
    nodes = list(dict.fromkeys(member.described["node_id"] for member in members))
    return sorted(members, key=lambda member: nodes.index(member.described["node_id"]))


class WorkerGroup:
    """Worker actors, in rank order once described. Before a run trains, an error waits for the death that explains it.
    Once it trains (`look_s` is set), errors are raised at once, and health is checked after `look_s` seconds without a
    result. `waits`: where waits for the group are reported.
    """

    def __init__(self, members: Sequence[WorkerHandle], waits: Waits | None = None) -> None:
        self.members = list(members)
        self.look_s: float | None = None
        self.exchange_s = math.inf  # how long all ranks may wait for one another
        self.waits = waits or Waits()

    @property
    def size(self) -> int:
        return len(self.members)

    def describe(self, device: str, probe: str) -> None:
        """Learn where the workers are, and number them so that the ranks of a node are neighbours."""
        for member, described in zip(self.members, self.call("describe", device, probe)):
            member.described = described
        self.members = by_node(self.members)

    @property
    def nodes(self) -> list[str]:
        return [member.described["node_id"] for member in self.members]

    @property
    def memory_bytes(self) -> int:
        """The device memory in bytes that every rank has at least. On the CPU, the ranks of a node share its memory."""
        sharing = Counter(self.nodes)
        return min(found["memory_bytes"] // (sharing[found["node_id"]] if found["device"] == "cpu" else 1)
                   for found in (member.described for member in self.members))

    @property
    def ranks(self) -> Ranks:
        described = [member.described for member in self.members]
        node_memory_bytes: dict[str, float] = {}
        for found in described:
            known = node_memory_bytes.get(found["node_id"], math.inf)
            node_memory_bytes[found["node_id"]] = min(known, found["host_memory_bytes"])
        return Ranks(
            kind=described[0]["device"], shape=described[0]["shape"], adapters=described[0]["adapters"],
            memory_bytes=self.memory_bytes, nodes=tuple(self.nodes), fused=all(found["fused"] for found in described),
            node_memory_bytes=node_memory_bytes,
            device_names=tuple(sorted({found["device_name"] for found in described})))

    @property
    def num_layers(self) -> int:
        return int(self.members[0].described["num_layers"])

    def membership(self) -> list[dict[str, Any]]:
        """The ranks of this generation, as cluster.json lists them."""
        return [{"rank": rank, **{name: member.described[name] for name in ("pid", "node_id", "device")}}
                for rank, member in enumerate(self.members)]

    def join(
        self, generation: int, store: tuple[str, int], replica_ranks: Sequence[int], pool_groups: int, mode: Mode,
        origins: Sequence[Any], step: int,
    ) -> list[ray.ObjectRef]:
        """Let all workers enter a generation after `step` in `mode`; the calls return their state versions."""
        return [
            member.actor.join.remote(
                Membership(rank, self.size, generation, *store, tuple(replica_ranks), pool_groups, mode,
                           tuple(self.nodes)), origin, step)
            for rank, (member, origin) in enumerate(zip(self.members, origins, strict=True))]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.collect(self.start(method, *arguments))

    def start(self, method: str, *arguments: Any) -> list[ray.ObjectRef]:
        """Call a method of every rank; returns one reference per rank, in their order."""
        return [getattr(member.actor, method).remote(*arguments) for member in self.members]

    def prefetch(self, slices: Sequence[RankPlan], index: RowIndex) -> list[ray.ObjectRef]:
        return [member.actor.prefetch.remote(*packed_slice(plan, index.blocks_of(plan)))
                for member, plan in zip(self.members, slices, strict=True)]

    def collect(
        self, calls: Sequence[ray.ObjectRef], look_s: float | None = None, stuck_s: float = math.inf,
        end_stuck: bool = False, behind_s: float = math.inf, stopping: Callable[[], str] | None = None,
    ) -> list[Any]:
        """Return the results by rank. While all workers make progress, they may take as long as they need.

        With `end_stuck`, a stuck worker is ended at once: the thread that is stuck may not be the training thread, the
        only one that a poll sees. GroupError: a rank died, raised, no longer answers, stands still for `stuck_s`
        without waiting for others, or has no result `behind_s` after another has one; or all ranks wait for one
        another. StoppingError: `stopping` gives a reason to end the run before all results have arrived.
        """
        pending = {call: rank for rank, call in enumerate(calls)}
        look_s = look_s or self.look_s
        looks = _HealthMonitor(self, stuck_s, end_stuck)
        looked_s, first_s = monotonic(), math.inf
        results: dict[int, Any] = {}
        while pending:
            if stopping and stopping():
                raise StoppingError
            ready = answered(list(pending), STOP_POLL_S if stopping else look_s)
            if ready:
                looked_s = monotonic()
            elif look_s is not None and monotonic() - looked_s >= look_s:
                looks.look(set(pending.values()))
                looked_s = monotonic()
                if looked_s - first_s >= behind_s:
                    raise GroupError(self.words(min(pending.values()), Condition.STUCK))
            for call, value in zip(ready, _values(ready)):
                rank = pending.pop(call)
                if isinstance(value, RayError):
                    raise self._root_cause(rank, value, pending)
                results[rank] = value
                first_s = min(first_s, monotonic())
        return [results[rank] for rank in range(len(results))]

    def wait(self, pending: Future[Any], enough: Callable[[], bool] = lambda: False) -> None:
        """Wait for `pending`, or until `enough`; once the run trains, a rank that dies raises GroupError."""
        last = monotonic()
        while not pending.done() and not enough():
            wait([pending], timeout=0.005)
            if self.look_s is not None and monotonic() - last >= IDLE_LOOK_S:
                for rank, status in enumerate(self.poll_health()):
                    if status.dead:
                        raise GroupError(self.words(rank, Condition.DEAD))
                last = monotonic()

    def poll_health(self, unresponsive: Collection[int] = ()) -> list[Status]:
        """Query the health of every worker, by rank, for at most SURVEY_S; `unresponsive` ranks, which have just failed
        to answer, get less time. Workers of a node of which none answers at once are dead if it is gone, which Ray may
        learn later. If no rank answers, this process itself may have been held up.
        """
        calls = self.start("status")
        late = set(ray.wait(calls, num_returns=len(calls), timeout=AGAIN_S)[1])
        answered_there = {node for call, node in zip(calls, self.nodes) if call not in late}
        gone = unnoticed(set(self.nodes) - answered_there) if late and answered_there else set()
        left = {rank: call for rank, call in enumerate(calls) if self.nodes[rank] not in gone}
        others = [call for rank, call in left.items() if rank not in unresponsive] or [*left.values()]
        ray.wait(others, num_returns=len(others), timeout=SURVEY_S)
        ray.wait([*left.values()], num_returns=len(left), timeout=AGAIN_S)
        return [_status_of(call) if rank in left else Status(dead=True, error="its node is gone")
                for rank, call in enumerate(calls)]

    def words(self, rank: int, condition: Condition) -> str:
        return f"rank {rank} ({self.members[rank].place}) {WORDS[condition]}"

    def _root_cause(self, rank: int, error: RayError, pending: Mapping[ray.ObjectRef, int]) -> GroupError:
        """Return the cause of a rank's error: before training a peer's death if there is one, else itself."""
        deadline, left = monotonic() + (GRACE_S if self.look_s is None else 0.0), list(pending)
        while left and not _died(error) and (left_s := deadline - monotonic()) > 0:
            ready, left = ray.wait(left, num_returns=1, timeout=left_s)
            for call, value in zip(ready, _values(ready)):
                if _died(value):  # others that raise do so as a consequence of the first
                    rank, error = pending[call], value
        if _died(error):
            return GroupError(f"{self.words(rank, Condition.DEAD)}: {death_of(error)}", rank=rank)
        words = words_of(getattr(error, "cause", None) or error)
        return GroupError(f"rank {rank} ({self.members[rank].place}): {words}", rank=rank)


class _HealthMonitor:
    """Polls the health of a group while some of its calls are pending."""

    def __init__(self, group: WorkerGroup, stuck_s: float, end_stuck: bool) -> None:
        self.group, self.end_stuck = group, end_stuck
        self.watchdog = ProgressWatchdog(group.size, stuck_s, monotonic())
        self.exchange = ProgressWatchdog(group.size, group.exchange_s, monotonic())

    def look(self, pending: set[int]) -> None:
        """Raise GroupError for a worker that is gone, or makes no progress with its call (ranks in `pending`)."""
        statuses = self.group.poll_health()
        unresponsive = [rank for rank, status in enumerate(statuses) if not (status.answered or status.dead)]
        too_long = [status.waits_for_peers
                    and self.exchange.overdue(rank, replace(status, waits_for_peers=False), monotonic())
                    for rank, status in enumerate(statuses) if rank in pending]
        if too_long and all(too_long):
            raise GroupError(f"all ranks have waited for one another for {self.group.exchange_s:g} s (comm.timeout_s)")
        for rank, status in enumerate(statuses):
            overdue = rank in pending and self.watchdog.overdue(rank, status, monotonic())
            condition = condition_of(status, overdue)
            if condition is Condition.STUCK and self.end_stuck:
                ray.kill(self.group.members[rank].actor)
            if condition is not Condition.HEALTHY:
                raise GroupError(self.group.words(rank, condition), unresponsive)


def answered(references: list[ray.ObjectRef], timeout_s: float | None) -> list[ray.ObjectRef]:
    """Wait for calls to end: at least one, unless none does within `timeout_s`."""
    first, others = ray.wait(references, num_returns=1, timeout=timeout_s)
    if not (first and others):
        return first
    return first + ray.wait(others, num_returns=len(others), timeout=GATHER_S)[0]


def _values(references: Sequence[ray.ObjectRef]) -> list[Any]:
    """Return, for calls that have ended, in order, the result or the error that Ray raises."""
    try:
        return list(ray.get(list(references)))
    except RayError as error:
        return [error] if len(references) == 1 else [_values([reference])[0] for reference in references]


def _died(value: Any) -> bool:
    """Whether an actor died, or its answer was lost with its node."""
    return isinstance(value, RayError) and not isinstance(value, RayTaskError)


def _status_of(call: ray.ObjectRef) -> Status:
    try:
        return ray.get(call, timeout=0)
    except (GetTimeoutError, RayTaskError):  # no answer, or the status call itself raised
        return Status(answered=False)
    except RayError as error:
        return Status(dead=True, error=death_of(error))
