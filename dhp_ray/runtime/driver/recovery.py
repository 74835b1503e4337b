"""From one generation of the group to the next: which workers stay, which state they go on from, and from which step.

    survey   find who is dead, silent, stuck or has raised; end their actors, ask the job's process for others
    settle   all others leave the broken generation, because sockets close or they are told to abort
    wait     until there are enough ranks
    load     the highest state version of which every shard survives; without one, the newest checkpoint
    join     survivors and newcomers meet; the state moves between their memories
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import ray

from dhp_ray.data.blocks import lose_nodes, start_servers
from dhp_ray.runtime.driver.elastic import (
    Condition,
    Form,
    GoOn,
    Standstill,
    Stop,
    Wait,
    condition_of,
    decide,
    surviving_state,
)
from dhp_ray.runtime.driver.group import Member, by_node
from dhp_ray.runtime.driver.session import Session
from dhp_ray.runtime.driver.stages import FinishedStep
from dhp_ray.runtime.messages import (
    FromCheckpoint,
    FromMemory,
    GroupError,
    Notice,
    Replace,
    RunError,
    Status,
    StoppingError,
)

POLL_S = 0.05
CAPACITY_POLL_S = 0.5
ENDING_S = 6.0
"""Ray ends a stopped process only after about 5 s; its sockets stay open until then."""


@dataclass
class WorkerHealth:
    """What a survey shows about one worker of the group."""

    member: Member
    condition: Condition
    status: Status


def form_anew(
    session: Session, cause: str, broken: bool, leaving: Mapping[int, Condition], silent: Sequence[int] = ()
) -> list[FinishedStep]:
    """Replace the current generation of `session` with the next one; returns the steps that are finished and not
    committed.

    `cause`: why, for the user; `broken`: the group's collectives have failed; `leaving`: ranks to be replaced although
    they work; `silent`: ranks that have just failed to answer a query.

    Raises:
        GroupError: the new generation broke too; call again.
        RunError: the run cannot go on; one line.
        StoppingError: the run is to end, and the newest checkpoint holds all that could be saved.
    """
    moments = {"begun": time.perf_counter()}
    if broken:
        session.records.event("broken", generation=session.current.number, step=session.records.last_step + 1,
                              cause=cause)
    session.current.dispatcher.drop()
    session.group.close_relays()
    _end_where_saved(session, session.records.last_step)
    with session.group.waits.on(f"the workers to leave generation {session.current.number}"):
        workers = _settled(session, leaving, silent)
    cause = ", ".join(session.group.words(rank, seen.condition) for rank, seen in enumerate(workers)
                      if seen.condition is not Condition.WELL) or cause
    _check_repetition(session, workers, cause if broken else "")
    moments["settle_s"] = time.perf_counter()
    with session.group.waits.on("new workers"):
        workers = _enough(session, workers, broken)
    moments["capacity_s"] = time.perf_counter()
    survivors = [seen for seen in workers if seen.condition is Condition.WELL]
    newcomers = session.arrivals.take(0 if session.stopping else session.max_workers - len(survivors))
    committed = session.records.last_step

    steps = _last_steps(survivors)
    surviving = surviving_state([seen.status.held for seen in survivors], steps)
    step = steps[surviving.version] if surviving else 0
    ran = {number: [seen.status.ran[number] for seen in survivors if number in seen.status.ran]
           for number in range(committed + 1, step + 1)}
    known = all(ran.values())  # false if a lost driver's ledger on an object store was many steps behind
    if surviving is None or step < committed or not known:
        saved = session.checkpoints.newest_step()
        if surviving is None or step < saved or not known:
            surviving, step, ran = None, saved, {}
    finished = [FinishedStep.reported(number, session.records.read_plan(number), found)
                for number, found in ran.items()]
    _end_where_saved(session, step)
    if step < committed or session.history.stream_lost:
        session.current.dispatcher.stop().clear()
        _go_back(session, step, committed)
    origins: dict[int, FromCheckpoint | FromMemory] = {}
    load = FromCheckpoint(session.checkpoints.manifest(step).files if step and not surviving else "")
    for place, seen in enumerate(survivors):
        origins[seen.member.slot] = (
            FromMemory(surviving.generation, surviving.version, surviving.owners[place]) if surviving else load)
    for member in newcomers:
        origins[member.slot] = FromMemory(surviving.generation, surviving.version) if surviving else load

    generation = max([session.current.number, *(seen.status.generation for seen in survivors)]) + 1
    session.group.members = by_node([*(seen.member for seen in survivors), *newcomers])
    lose_nodes({str(seen.member.described["node_id"]) for seen in workers
                if seen.condition in (Condition.DEAD, Condition.SILENT)}, session.group.nodes)
    start_servers(session.group.nodes)
    session.current.number = generation
    calls = session.group.join(generation, session.store, session.replica_ranks, session.pool_groups,
                               session.choose_mode(), [origins[member.slot] for member in session.group.members], step)
    try:
        with session.group.waits.on(f"the workers to meet in generation {generation}"):
            session.group.collect(calls, stopping=None if surviving else session.stop_reason)
    except GroupError:
        session.group.each("abort_generation", generation)  # those that still wait for the others
        raise
    moments["join_s"] = time.perf_counter()
    session.current.evaluation.stop()
    batches, reader = session.current.dispatcher.hand_over()  # a batch may still be read: nothing waits for it here
    for number in [number for number in list(batches) if number <= committed]:  # the reader may add one meanwhile
        del batches[number]  # commits drop those of finished steps
    session.enter(generation, batches, reader)
    moments["hand_over_s"] = time.perf_counter()
    seconds = moments["hand_over_s"] - moments["begun"]
    spent = {name: round(end - begin, 3) for (_, begin), (name, end) in pairwise(moments.items())}
    session.records.event("generation", generation=generation, cause=cause, step=step + 1, num_ranks=session.group.size,
                          seconds=round(seconds, 3), **spent,
                          version=surviving.version if surviving else None, survivors=len(survivors),
                          newcomers=len(newcomers))
    words = (
        f"generation {generation}: {cause}; {session.group.size} ranks go on with step {step + 1} after {seconds:.1f} s"
    )
    session.scalars.scalars(step + 1, {"elastic/recovery_s": seconds})
    session.scalars.text("events", words, step + 1)
    session.tell(Notice(words))
    return finished


def _end_where_saved(session: Session, step: int) -> None:
    """Raise StoppingError if the run is to end and the newest checkpoint is already of `step` or later."""
    if session.stopping and step <= session.checkpoints.newest_step():
        raise StoppingError


def _settled(
    session: Session, leaving: Mapping[int, Condition], silent: Sequence[int]
) -> list[WorkerHealth]:
    """Query the health of every worker until all healthy ones have left their calls; end and replace the others."""
    group = session.group
    stuck_s = max(session.config.elastic.hang_s, session.history.stuck_s)
    standstill = Standstill(group.size, stuck_s, time.monotonic())
    ended: dict[int, WorkerHealth] = {}  # as they were when they were ended
    aborts: dict[int, ray.ObjectRef] = {}
    while True:
        _end_where_saved(session, session.records.last_step)
        seen = group.survey([place for place in silent if place not in ended])
        for place, (_, status) in enumerate(seen):
            # one call at a time: those that wait for it would leave no thread that can answer the next survey
            if status.call and (place not in aborts or ray.wait([aborts[place]], timeout=0)[0]):
                # the ranks that it waits for, to meet or to make a group, may never come
                aborts[place] = group.members[place].actor.abort_generation.remote(status.generation)
        workers = []
        for place, (report, status) in enumerate(seen):
            # there is no rank left for it to wait for
            overdue = standstill.overdue(place, replace(report, waits_for_peers=False), time.monotonic())
            condition = condition_of(report, overdue and bool(status.call))
            if condition is Condition.WELL and place in leaving:
                condition = leaving[place]
            workers.append(WorkerHealth(group.members[place], condition, status))
        for place, found in enumerate(workers):
            if found.condition is not Condition.WELL and place not in ended:
                ended[place] = found
                if found.condition is Condition.SLOW:
                    session.history.evicted_slots.add(found.member.slot)
                session.records.event("worker_lost", rank=place, pid=found.member.described["pid"],
                                      node_id=found.member.described["node_id"],
                                      condition=str(found.condition), error=found.status.error,
                                      last_mark=found.status.last_mark)
                ray.kill(found.member.actor)
                session.tell(Replace(found.member.slot))
                # until then others may wait for it
                standstill = Standstill(group.size, ENDING_S + stuck_s, time.monotonic())
        if not any(found.status.call and found.condition is Condition.WELL for found in workers):
            return [ended.get(place, found) for place, found in enumerate(workers)]
        time.sleep(POLL_S)


def _check_repetition(session: Session, workers: list[WorkerHealth], cause: str) -> None:
    """Stop a run that breaks in the same step again and again. `cause`: why it broke this time; empty if it did not."""
    if not cause:
        return
    step = session.records.last_step + 1
    raised = [f"rank {rank} ({found.member.place}) raised: {found.status.error}" for rank, found in enumerate(workers)
              if found.condition is Condition.RAISED]
    session.history.failures = session.history.failures.with_one(step, bool(raised))
    if session.history.failures.hopeless(step):
        why = raised[0] if raised else f"its workers die or hang, at last: {cause} (see events.jsonl)"
        raise RunError(f"step {step} has failed {session.history.failures.steps.count(step)} times; {why}")


def _enough(
    session: Session, workers: list[WorkerHealth], broken: bool
) -> list[WorkerHealth]:
    """Wait until there are as many survivors and newcomers as the run needs."""
    told = False
    while True:
        ready = session.arrivals.ready()
        arrival_messages(session)
        # A run that is to end forms a new generation of whoever is left, to save what they hold.
        enough = max(session.config.cluster.min_workers, session.current.dispatcher.needed_ranks)
        needed = 1 if session.stopping else enough
        conditions = [found.condition for found in workers]
        match decide(conditions, len(ready), needed, session.max_workers, broken or bool(session.stopping)):
            case Stop(reason):
                raise RunError(reason)
            case Form() | GoOn():
                return workers
            case Wait(num_ranks, have):
                if session.stopping:  # no worker is left to save from
                    raise StoppingError
                if not told:
                    told = True
                    session.records.event("waiting", num_ranks=num_ranks, have=have)
                    session.tell(Notice(f"{have} workers are left, the run needs {num_ranks}: waiting for capacity"))
        time.sleep(CAPACITY_POLL_S)
        # the others are being replaced
        session.group.members = [found.member for found in workers if found.condition is Condition.WELL]
        workers = _settled(session, {}, ())


def arrival_messages(session: Session) -> None:
    """Ask for replacements of newcomers that failed before they joined, and report those that load for long."""
    session.arrivals.report(
        lambda slot, why: session.records.event("newcomer_lost", slot=slot, error=why))


def _last_steps(survivors: Sequence[WorkerHealth]) -> dict[int, int]:
    """Return the last step that left each state version, of those that a survivor knows."""
    steps: dict[int, int] = {}
    for seen in survivors:
        for version, step in seen.status.steps.items():
            steps[version] = max(step, steps.get(version, 0))
    return steps


def _go_back(session: Session, step: int, committed: int) -> None:
    """Move the stream back to `step`, and the records too if later steps have been committed.

    The stream stays lost until the new generation has taken over: if that breaks, the stream may be needed at another
    step.
    """
    session.history.stream_lost = True
    if step < committed:
        session.records.event("rollback", step=step, committed=committed)
        session.tell(Notice(f"the state after step {committed} is lost: going back to step {step}"))
        session.roll_back(step)
    if session.stopping:
        return  # the stream may still be being read, and no step will use it
    if step in session.checkpoints.complete():  # also of a run whose plan files are not here
        session.stream.restore(session.checkpoints.manifest(step).cursor)
    elif step:
        session.stream.restore(session.records.read_plan(step)["batch"]["cursor"])
    else:
        session.stream.start_epoch(0)
