"""From one generation of the group to the next: which workers stay, which state they go on from, and from which step.

    settle      find who is dead, unresponsive, stuck or has raised; end their actors, ask the job's process for others;
                the rest leave the broken generation, because sockets close or they are told to abort
    capacity    wait until there are enough ranks, with workers that the job's process has started meanwhile
    state       the highest version of which every shard survives; without one, the newest checkpoint
    join        survivors and newcomers meet; the state moves between their memories
    hand over   batches that have been read are planned for the new ranks

A new driver first takes over the workers of a lost one: some are in the middle of a step, some are dead or hung, some
have not joined yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter, sleep

import ray
from ray._private.state import state
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from dhp_ray.data.blocks import lose_nodes, start_servers
from dhp_ray.errors import counted, first_line
from dhp_ray.run_folder import CONFIG_FILE
from dhp_ray.runtime.driver.dispatch import FinishedStep
from dhp_ray.runtime.driver.elastic import (
    Condition,
    ProgressWatchdog,
    Stop,
    SurvivingState,
    Wait,
    condition_of,
    shortage,
    surviving_state,
)
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle, by_node
from dhp_ray.runtime.driver.session import Session
from dhp_ray.runtime.messages import (
    FromCheckpoint,
    FromMemory,
    GroupError,
    Notice,
    Replace,
    RunError,
    Status,
    StoppingError,
    Tell,
    death_of,
)
from dhp_ray.runtime.records.run_records import RunRecords
from dhp_ray.runtime.waits import said_at_s

POLL_S = 0.05
CAPACITY_POLL_S = 0.5
ENDING_S = 6.0  # Ray ends a stopped process only after about 5 s; its sockets stay open until then
LONGEST_S = 300.0  # the most seconds until another worker is asked for in the place of one that failed before it joined

LOADS_LONG_S = 60.0
"""A newcomer that loads the model for this many seconds is reported, and again after 3, 6, 12, 30 times as many."""

DRAINING_LOOK_S = 1.0  # seconds between two queries to the head of the cluster for nodes that are being drained


@dataclass
class WorkerHealth:
    """One worker of the group when its health was polled."""

    member: WorkerHandle
    condition: Condition
    status: Status

    @property
    def healthy(self) -> bool:
        return self.condition is Condition.HEALTHY


@dataclass(frozen=True)
class StartingPoint:
    """A generation goes on after `step`, with the state `surviving` in the workers' memories (None: that of the
    checkpoint of `step`, or fresh weights). `finished`: the steps up to there that are not committed.
    """

    step: int
    surviving: SurvivingState | None = None
    finished: tuple[FinishedStep, ...] = ()


def reconfigure(
    session: Session, pending: PendingWorkers, cause: str, broken: bool, leaving: Mapping[int, Condition],
    unresponsive: Sequence[int] = (),
) -> Sequence[FinishedStep]:
    """Replace the current generation with the next one; returns the steps that are finished and not committed. `cause`:
    why, for the user; `broken`: collectives have failed; `leaving`: ranks to be replaced although they work;
    `unresponsive`: ranks that have just failed to answer. GroupError: the new generation broke too; call again.
    StoppingError: the run is to end, and all is saved.
    """
    moments = {"begun": perf_counter()}
    if broken:
        session.records.event("broken", generation=session.current.number, step=session.records.last_step + 1,
                              cause=cause)
    session.current.dispatcher.drop()
    with session.group.waits.on(f"the workers to leave generation {session.current.number}"):
        workers = _settle(session, leaving, unresponsive)
    cause = ", ".join(session.group.words(rank, worker.condition) for rank, worker in enumerate(workers)
                      if not worker.healthy) or cause
    if broken:
        _check_repetition(session, workers, cause)
    moments["settle_s"] = perf_counter()
    with session.group.waits.on("new workers"):
        workers = _wait_for_capacity(session, pending, workers)
    moments["capacity_s"] = perf_counter()
    survivors = [worker for worker in workers if worker.healthy]
    newcomers = pending.take(0 if session.stopping else session.max_workers - len(survivors))
    start, committed = _starting_point(session, survivors), session.records.last_step
    _end_where_saved(session, start.step)
    if start.step < committed or session.history.stream_lost:
        session.current.dispatcher.stop().clear()
        _go_back(session, start.step)
    _join(session, survivors, newcomers, start)
    moments["join_s"] = perf_counter()
    _hand_over(session, committed)
    moments["hand_over_s"] = perf_counter()
    seconds = moments["hand_over_s"] - moments["begun"]
    spent = {name: round(end - begin, 3) for (_, begin), (name, end) in pairwise(moments.items())}
    session.records.event("generation", generation=session.current.number, cause=cause, step=start.step + 1,
                          num_ranks=session.group.size, seconds=round(seconds, 3), **spent,
                          version=start.surviving.version if start.surviving else None, survivors=len(survivors),
                          newcomers=len(newcomers))
    words = (f"generation {session.current.number}: {cause}; "
             f"{counted(session.group.size, 'rank')} {'goes' if session.group.size == 1 else 'go'} on with step "
             f"{start.step + 1} after {seconds:.1f} s")
    session.scalars.scalars(start.step + 1, {"elastic/recovery_s": seconds})
    session.scalars.text("events", words, start.step + 1)
    session.tell(Notice(words))
    return start.finished


def _end_where_saved(session: Session, step: int) -> None:
    """Raise StoppingError if the run is to end and a checkpoint is already of `step` or later."""
    if session.stopping and step <= session.checkpoints.newest_step():
        raise StoppingError


def _settle(session: Session, leaving: Mapping[int, Condition], unresponsive: Sequence[int]) -> list[WorkerHealth]:
    """Poll the health of every worker until all healthy ones have left their calls; end and replace the others."""
    group = session.group
    stuck_s = max(session.config.elastic.hang_s, session.history.stuck_s)
    watchdog = ProgressWatchdog(group.size, stuck_s, monotonic())
    ended: dict[int, WorkerHealth] = {}  # as they were when they were ended
    aborts: dict[int, ray.ObjectRef] = {}
    while True:
        _end_where_saved(session, session.records.last_step)
        workers = []
        for place, status in enumerate(group.poll_health([one for one in unresponsive if one not in ended])):
            # one call at a time: those that wait for it would leave no thread that can answer the next query
            if status.call and (place not in aborts or ray.wait([aborts[place]], timeout=0)[0]):
                # the ranks that it waits for, to meet or to make a group, may never come
                aborts[place] = group.members[place].actor.abort_generation.remote(status.generation)
            # there is no rank left for it to wait for
            overdue = watchdog.overdue(place, replace(status, waits_for_peers=False), monotonic())
            condition = condition_of(status, overdue and bool(status.call))
            if condition is Condition.HEALTHY and place in leaving:
                condition = leaving[place]
            workers.append(WorkerHealth(group.members[place], condition, status))
        unfit = [place for place, worker in enumerate(workers) if not worker.healthy and place not in ended]
        waiting = [place for place in unfit
                   if workers[place].condition is Condition.STUCK and workers[place].status.waits_for_peers]
        # of those that wait for a vanished host and for one another, the end of a few may free the others
        ending = [place for place in unfit if place not in waiting] or waiting[:max(1, len(ended))]
        for place in ending:
            ended[place] = workers[place]
            _end(session, place, workers[place])
            # until then others may wait for it
            watchdog = ProgressWatchdog(group.size, ENDING_S + stuck_s, monotonic())
        if ending == unfit and not any(worker.status.call and worker.healthy for worker in workers):
            found = [ended.get(place, worker) for place, worker in enumerate(workers)]
            lose_nodes({str(worker.member.described["node_id"]) for worker in found
                        if worker.condition in (Condition.DEAD, Condition.UNRESPONSIVE)},
                       [str(worker.member.described["node_id"]) for worker in found if worker.healthy])
            return found
        sleep(POLL_S)


def _end(session: Session, rank: int, worker: WorkerHealth) -> None:
    """End a worker's actor, and ask for another one."""
    if worker.condition is Condition.SLOW:
        session.history.evicted_slots.add(worker.member.slot)
    session.records.event("worker_lost", rank=rank, pid=worker.member.described["pid"],
                          node_id=worker.member.described["node_id"], condition=str(worker.condition),
                          error=worker.status.error, last_mark=worker.status.last_mark)
    ray.kill(worker.member.actor)
    session.tell(Replace(worker.member.slot))


def _check_repetition(session: Session, workers: list[WorkerHealth], cause: str) -> None:
    """Stop a run that breaks in the same step again and again. `cause`: why it broke this time."""
    step = session.records.last_step + 1
    raised = [f"rank {rank} ({worker.member.place}) raised: {worker.status.error}"
              for rank, worker in enumerate(workers) if worker.condition is Condition.RAISED]
    session.history.failures = session.history.failures.with_one(step, bool(raised))
    if session.history.failures.hopeless(step):
        why = raised[0] if raised else f"its workers die or hang, at last: {cause} (see events.jsonl)"
        raise RunError(f"step {step} has failed {session.history.failures.steps.count(step)} times; {why}")


def _wait_for_capacity(session: Session, pending: PendingWorkers, workers: list[WorkerHealth]) -> list[WorkerHealth]:
    """Wait until there are as many survivors and newcomers as the run needs."""
    told = False
    while True:
        ready = pending.ready()
        pending.report(session.records)
        # A run that is to end forms a new generation of whoever is left, to save what they hold.
        enough = max(session.config.cluster.min_workers, session.current.dispatcher.needed_ranks)
        needed = 1 if session.stopping else enough
        match shortage(sum(worker.healthy for worker in workers), len(ready), needed, session.max_workers):
            case None:
                return workers
            case Stop(reason):
                raise RunError(reason)
            case Wait(num_ranks, have):
                if session.stopping:  # no worker is left to save from
                    raise StoppingError
                if not told:
                    told = True
                    session.records.event("waiting", num_ranks=num_ranks, have=have)
                    session.tell(Notice(f"{have} workers are left, the run needs {num_ranks}: waiting for capacity"))
        sleep(CAPACITY_POLL_S)
        # the others are being replaced
        session.group.members = [worker.member for worker in workers if worker.healthy]
        workers = _settle(session, {}, ())


def _starting_point(session: Session, survivors: Sequence[WorkerHealth]) -> StartingPoint:
    """Return where these survivors go on: with their state if it is whole and not behind the newest checkpoint."""
    steps: dict[int, int] = {}  # the last step that left each state version, of those that a survivor knows
    for worker in survivors:
        for version, step in worker.status.steps.items():
            steps[version] = max(step, steps.get(version, 0))
    committed = session.records.last_step
    surviving = surviving_state([worker.status.held for worker in survivors], steps)
    if surviving is None:
        return StartingPoint(session.checkpoints.newest_step())
    step = steps[surviving.version]
    ran = {number: [worker.status.ran[number] for worker in survivors if number in worker.status.ran]
           for number in range(committed + 1, step + 1)}
    if not all(ran.values()):  # a lost driver's ledger on an object store was many steps behind
        return StartingPoint(session.checkpoints.newest_step())
    if step < committed and step < (saved := session.checkpoints.newest_step()):
        return StartingPoint(saved)
    return StartingPoint(step, surviving, tuple(
        FinishedStep.reported(number, session.records.read_plan(number), found) for number, found in ran.items()))


def _go_back(session: Session, step: int) -> None:
    """Move the stream back to `step`, and the records too if later steps have been committed. The stream counts as lost
    until the new generation has taken over: that may break, and the next go on from another step.
    """
    session.history.stream_lost, committed = True, session.records.last_step
    if step < committed:
        session.records.event("rollback", step=step, committed=committed)
        session.tell(Notice(f"the state after step {committed} is lost: going back to step {step}"))
        session.watch.close()
        session.records.truncate(step)
        session.note_not_deleted(session.checkpoints.discard_after(step))
        session.scalars.restart(step + 1)
    if session.stopping:
        return  # the stream may still be being read, and no step will use it
    if step in session.checkpoints.complete():  # also of a run whose plan files are not here
        session.stream.restore(session.checkpoints.manifest(step).cursor)
    elif step:
        session.stream.restore(session.records.read_plan(step)["batch"]["cursor"])
    else:
        session.stream.start_epoch(0)


def _join(
    session: Session, survivors: Sequence[WorkerHealth], newcomers: Sequence[WorkerHandle], start: StartingPoint
) -> None:
    """Let survivors and newcomers meet in the next generation."""
    group, surviving = session.group, start.surviving
    origins: dict[int, FromCheckpoint | FromMemory] = {}
    if surviving:
        origins |= {member.slot: FromMemory(surviving.generation, surviving.version) for member in newcomers}
        origins |= {worker.member.slot: FromMemory(surviving.generation, surviving.version, owners)
                    for worker, owners in zip(survivors, surviving.owners, strict=True)}
    load = FromCheckpoint(session.checkpoints.manifest(start.step).files if start.step and not surviving else "")
    generation = max([session.current.number, *(worker.status.generation for worker in survivors)]) + 1
    group.members = by_node([*(worker.member for worker in survivors), *newcomers])
    lose_nodes((), group.nodes)
    start_servers(group.nodes)
    session.current.number = generation
    calls = group.join(generation, session.store, session.replica_ranks, session.pool_groups, session.choose_mode(),
                       [origins.get(member.slot, load) for member in group.members], start.step)
    try:
        with group.waits.on(f"the workers to meet in generation {generation}"):
            group.collect(calls, stopping=None if surviving else session.stop_reason)
    except GroupError:
        group.start("abort_generation", generation)  # those that still wait for the others
        raise


def _hand_over(session: Session, committed: int) -> None:
    """Let the new generation plan the batches that are left; a batch may still be read, and nothing waits for it."""
    session.current.evaluation.stop()
    session.current.dispatcher.end_planning()
    batches = session.reader.batches
    for number in [number for number in list(batches) if number <= committed]:  # the reader may add one meanwhile
        del batches[number]  # commits drop those of finished steps
    session.enter(session.current.number)


def take_over(
    group: WorkerGroup, pending: PendingWorkers, look_s: float, describe: Callable[[], None],
    stopping: Callable[[], str], tell: Tell,
) -> None:
    """Keep the surviving workers of a lost driver, checking their health every `look_s` seconds meanwhile."""
    group.look_s = look_s
    while True:
        _part(group, pending, tell)
        with group.waits.on("new workers"):
            if not group.members:
                tell(Notice("no worker is left: waiting for new ones"))
            while not group.members:  # the run goes on from its newest checkpoint
                if reason := stopping():
                    raise RunError(f"stopped ({reason}) while waiting for workers")
                sleep(CAPACITY_POLL_S)
                group.members = pending.take(1)
                pending.report()
        try:
            describe()
            return
        except GroupError as error:
            tell(Notice(f"one more is lost: {error}"))
            if error.rank is not None:  # it may live, and would fail again
                _lose(group, group.members[error.rank], tell)


def _part(group: WorkerGroup, pending: PendingWorkers, tell: Tell) -> None:
    """Drop workers that are not healthy; those that are in no generation, unlike others, become newcomers."""
    seen = list(zip(group.members, group.poll_health()))
    begun = any(status.generation for _, status in seen)
    for member, status in seen:
        if condition_of(status, overdue=False) is not Condition.HEALTHY:
            _lose(group, member, tell)
        elif begun and not status.generation:
            group.members.remove(member)
            pending.offer(member.slot, member.actor)


def _lose(group: WorkerGroup, member: WorkerHandle, tell: Tell) -> None:
    ray.kill(member.actor)
    group.members.remove(member)
    tell(Replace(member.slot))


@dataclass
class _Newcomer:
    """`loads_since_s`: when its process had started; None before, and once it has loaded."""

    member: WorkerHandle
    described: ray.ObjectRef
    prepared: ray.ObjectRef
    loads_since_s: float | None = field(default=None, init=False)
    num_reports: int = field(default=0, init=False)


class PendingWorkers:
    """Workers that the job's process has started and that are not members yet: replacements, and workers by which a run
    grows. Each is ready once it has described itself and loaded the model. `offer` may be called from any thread.
    """

    def __init__(self, device: str, tell: Tell) -> None:
        self._device, self._tell = device, tell
        self._offered: SimpleQueue[tuple[int, ActorHandle]] = SimpleQueue()
        self._coming: list[_Newcomer] = []
        self.failed: list[tuple[int, str]] = []
        self._waits_s: dict[int, float] = {}  # by slot: how long to wait after the next failure
        self._wanted: list[tuple[float, int]] = []  # when a slot is to be filled again

    def offer(self, slot: int, actor: ActorHandle) -> None:
        self._offered.put((slot, actor))

    def ready(self) -> list[WorkerHandle]:
        """Return the newcomers that can join now. One that failed goes into `failed` with the reason."""
        while True:
            try:
                slot, actor = self._offered.get_nowait()
            except Empty:
                break
            self._coming.append(_Newcomer(WorkerHandle(slot, actor), actor.describe.remote(self._device, CONFIG_FILE),
                                          actor.prepare.remote()))
        return [newcomer.member for newcomer in list(self._coming) if self._is_ready(newcomer)]

    def take(self, number: int) -> list[WorkerHandle]:
        """Take at most `number` of the ready newcomers; they are members from here on."""
        taken = self.ready()[:number]
        self._coming = [newcomer for newcomer in self._coming if newcomer.member not in taken]
        for member in taken:
            self._waits_s.pop(member.slot, None)
        return taken

    def report(self, records: RunRecords | None = None) -> None:
        """Report newcomers that load for long, and ask for others in the slots of those that failed: at once, then
        after 2, 4, 8, ... up to LONGEST_S seconds. Call it again and again.
        """
        now = monotonic()
        for newcomer in self._coming:
            seconds = 0.0 if newcomer.loads_since_s is None else now - newcomer.loads_since_s
            if seconds >= said_at_s(newcomer.num_reports, LOADS_LONG_S):
                newcomer.num_reports += 1
                self._tell(Notice(f"a new worker ({newcomer.member.place}) loads the model: {seconds:.0f} s so far"))
        while self.failed:
            slot, why = self.failed.pop()
            wait_s = self._waits_s.get(slot, 0.0)
            self._waits_s[slot] = min(max(2.0, 2 * wait_s), LONGEST_S)
            self._wanted.append((now + wait_s, slot))
            if records:
                records.event("newcomer_lost", slot=slot, error=why)
            later = f" in {wait_s:g} s" if wait_s else ""
            self._tell(Notice(f"a new worker failed, another is asked for{later}: {why}"))
        due = [slot for at_s, slot in self._wanted if at_s <= now]
        self._wanted = [(at_s, slot) for at_s, slot in self._wanted if at_s > now]
        for slot in due:
            self._tell(Replace(slot))

    def _is_ready(self, newcomer: _Newcomer) -> bool:
        calls = [newcomer.described, newcomer.prepared]
        done, _ = ray.wait(calls, num_returns=2, timeout=0)
        try:
            if newcomer.described in done:
                newcomer.member.described = ray.get(newcomer.described)
                newcomer.loads_since_s = newcomer.loads_since_s or monotonic()
            if newcomer.prepared in done:
                ray.get(newcomer.prepared)
                newcomer.loads_since_s = None
            return len(done) == 2
        except RayError as error:
            why = first_line(error.cause) if isinstance(error, RayTaskError) else death_of(error)
            self._coming.remove(newcomer)
            self.failed.append((newcomer.member.slot, why))
            return False


@dataclass
class DrainingNodes:
    """The nodes that Ray is about to take away, at most DRAINING_LOOK_S old. It starts nothing new on them."""

    _ids: frozenset[str] = frozenset()
    _asked_s: float = field(default_factory=lambda: monotonic() - DRAINING_LOOK_S)

    def ids(self) -> frozenset[str]:
        if monotonic() - self._asked_s >= DRAINING_LOOK_S:
            self._ids = frozenset(state.get_draining_nodes())  # Ray has no public call for it
            self._asked_s = monotonic()
        return self._ids


def leaving_ranks(session: Session, draining: DrainingNodes) -> dict[int, Condition]:
    """Return the ranks that should leave: too slow (unless their replacement was too), or on a node that is drained."""
    drained = draining.ids()
    return {rank: Condition.SLOW for rank in session.current.meter.no_good()
            if session.group.members[rank].slot not in session.history.evicted_slots} | {
        rank: Condition.DRAINED for rank, node in enumerate(session.group.nodes) if node in drained}
