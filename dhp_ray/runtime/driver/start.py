"""What happens before the first step: the run folder is opened, the workers join, the data stream moves to its place.

With `planner.cost=measure` the workers first measure, in a generation of their own, what packs cost. The run keeps the
result in cost.yaml for later starts with the same model, devices and settings.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from io import BytesIO
from itertools import islice
from pathlib import Path

import yaml

from dhp_ray.config import Config, dump
from dhp_ray.data.blocks import start_servers
from dhp_ray.data.formats.parquet import row_group_warning
from dhp_ray.data.index import data_sources
from dhp_ray.data.stream import Cursor, Stream, in_thread
from dhp_ray.errors import about, counted
from dhp_ray.measure import cost_file
from dhp_ray.measure.fitting import MeasureError
from dhp_ray.measure.rounds import PARTS, PartResult, Spec
from dhp_ray.planner import warm_up
from dhp_ray.planner.cost.model import constants_of_text
from dhp_ray.planner.cost.origin import CostFile
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.mode import Mode
from dhp_ray.planner.plan.types import Sample, of_json
from dhp_ray.run_folder import COST_FILE, COST_PICTURE, LEDGER_FILE, TENSORBOARD_FOLDER
from dhp_ray.runtime.driver.elastic import Condition
from dhp_ray.runtime.driver.evaluation import open_held_out
from dhp_ray.runtime.driver.group import WorkerGroup, WorkerHandle
from dhp_ray.runtime.driver.recovery import PendingWorkers, take_over
from dhp_ray.runtime.driver.session import LOOKS_PER_HANG, Session
from dhp_ray.runtime.messages import FromCheckpoint, Notice, RunError, RunStarted, Tell
from dhp_ray.runtime.records.checkpoints import Checkpoints, Manifest
from dhp_ray.runtime.records.run_records import RunRecords, check_run, last_committed, stored_config
from dhp_ray.runtime.records.tensorboard import ScalarLog, StepPictures
from dhp_ray.runtime.strategy import Strategy, gib, model_name, recorded_sync, resolve
from dhp_ray.schema import MEASURE
from dhp_ray.storage import Folder, StorageError


def open_session(config: Config, folder: Folder, group: WorkerGroup, store: tuple[str, int], pending: PendingWorkers,
                 takes_over: bool, tell: Tell, stopping: Callable[[], str]) -> Session:
    """Open or resume the run of `run.dir`, which is `folder`. `takes_over`: the workers hold the state of this run,
    whose driver was lost; they keep it. `stopping` returns why to end early.
    """
    compiled = in_thread(warm_up, "planner-warm-up")  # done by the time the workers are up
    with about(StorageError, "run.dir"), group.waits.on("run.dir"):
        folder.probe()
    if not takes_over:
        check_run(folder, config, last_committed(folder))  # before anything is opened there
    records, checkpoints = RunRecords(folder), Checkpoints(folder, config.checkpoint.keep)
    newest = None if takes_over else covered_checkpoint(records, checkpoints, tell)
    last_step = records.last_step if takes_over else newest.step if newest else 0
    with group.waits.on("the index of the data"):
        stream = Stream(config.data, config.model, config.seed, drop_last=config.batch.drop_last)
        held_out = open_held_out(config)
    for line in [] if takes_over else filter(None, (row_group_warning(source.fragments) for source in stream.sources)):
        tell(Notice(line))
    start_servers()
    not_deleted: list[str] = []
    if takes_over:
        take_over(group, pending, config.elastic.hang_s / LOOKS_PER_HANG,
                  lambda: describe(group, folder, config.cluster.device), stopping, tell)
    else:
        not_deleted = checkpoints.discard_after(last_step)  # before the workers report how much space is free
        if not records.last_step:  # a start that failed may have had other data and limits
            records.truncate(0)
        tell(Notice(f"starting {counted(config.cluster.num_workers, 'worker')} on {config.cluster.device}"))
        describe(group, folder, config.cluster.device)
    for line in dict.fromkeys(line for member in group.members for line in member.described["told"] if line):
        tell(Notice(line))
    stored = stored_config(folder) if takes_over or records.last_step else {}
    first_batch: Sequence[Sample] = ()
    if Strategy(config, group.ranks).compares_modes(recorded_sync(config, stored)):
        first_batch = _first_batch(config, group, records, stream, compiled)
    resolved = resolve(config, group.ranks, stored, first_batch, takes_over)
    for line in resolved.notices:
        tell(Notice(line))
    total_steps = config.run.steps or config.run.epochs * batches_of(stream.num_rows, config)
    if not takes_over and (warning := warmup_warning(config.train.warmup_steps, total_steps)):
        tell(Notice(warning))
    scalars = ScalarLog(folder.child(TENSORBOARD_FOLDER), last_step + 1)
    pictures = StepPictures(folder, config.watch.every_steps)
    session = Session(resolved, group, store, records, checkpoints, scalars, pictures, stream, held_out, total_steps,
                      compiled, tell, first_batch, stopping)
    stream.limit(session.config.planner.max_sequence_tokens, session.strategy.largest_admitted)
    if config.planner.cost == MEASURE:
        session.history.measured_cost, reason = kept_cost(folder, session.strategy, resolved.choice.mode)
        if told := cost_notice(session.history.measured_cost, reason, takes_over):
            tell(Notice(told))
    if takes_over:
        _go_on(session)
    else:
        session.note_not_deleted(not_deleted)
        _begin(session, newest)
    return session


def _first_batch(config: Config, group: WorkerGroup, records: RunRecords, stream: Stream, compiled: Future[float]
                 ) -> Sequence[Sample]:
    """Return the samples of the run's first batch, once modes can be compared by it."""
    with group.waits.on("the planner's loops, which are being compiled"):
        compiled.result()
    with group.waits.on("the first batch"):
        planned = of_json(records.planned_inputs(1).get("samples", []), tuple[Sample, ...])
        return planned or first_samples(stream, config.batch.global_samples)


def _go_on(session: Session) -> None:
    """Continue with the workers of a lost driver, which still are in the generation that it has left them."""
    records, group = session.records, session.group
    session.history.stream_lost = True
    session.history.refits.restore(records.planned_inputs(records.last_step + 1, records.last_step).get("cost", {}))
    if not stored_config(records.folder):  # the driver was lost before the first step
        records.write_config(session.config, session.resolved.image_limit)
    session.current.number = records.membership()["generation"]
    session.choose_mode()
    session.plan_for_group()
    times_s = session.history.step_times_s
    times_s.extendleft(islice(records.step_times_s(), times_s.maxlen))
    here = {(member.described["node_id"], member.described["pid"]) for member in group.members}
    for rank in records.membership()["ranks"]:
        if (rank["node_id"], rank["pid"]) not in here:  # no poll shows those lost with the driver
            records.event("worker_lost", rank=rank["rank"], pid=rank["pid"], node_id=rank["node_id"],
                          condition=str(Condition.DEAD), error="", last_mark="")
    group.waits.keep(records.waited)


def _begin(session: Session, newest: Manifest | None) -> None:
    """Let the workers join the first generation of this start, with the state of the checkpoint `newest`."""
    config, group, records, last_step = session.config, session.group, session.records, newest.step if newest else 0
    check_room(group.members, config, records.folder.local_path(), len(session.checkpoints.complete()),
               saves_ahead(last_step, session.total_steps, config.checkpoint.every_steps))
    records.write_config(config, session.resolved.image_limit)
    group.waits.keep(records.waited)
    records.truncate(last_step)
    if newest:
        session.stream.restore(newest.cursor)
        session.history.refits.restore(newest.cost.get("terms", {}), newest.cost.get("prior"))
    generation = records.membership()["generation"] + 1  # one after those of earlier starts
    mode = session.choose_mode()
    if config.planner.cost == MEASURE and not session.history.measured_cost:
        session.history.measured_cost = measure_costs(session, mode, generation)
        generation += 1
    with group.waits.on("the workers to load the model and to meet"):
        group.collect(group.join(generation, session.store, session.replica_ranks, session.pool_groups, mode,
                                 [FromCheckpoint(newest.files if newest else "")] * group.size, last_step))
    session.enter(generation)
    session.scalars.text("configuration", f"```yaml\n{dump(config)}\n```")
    session.scalars.hyperparameters(config)
    records.event("started", generation=generation, step=last_step + 1, num_ranks=group.size)
    session.tell(RunStarted(_opening(session, last_step), last_step + 1, session.total_steps))


def covered_checkpoint(records: RunRecords, checkpoints: Checkpoints, tell: Tell) -> Manifest | None:
    """Return the newest checkpoint that the ledger covers; the run goes on from it. Says so if there are newer ones, or
    none for the steps of the ledger; refuses a folder that has newer ones alone.
    """
    whole = checkpoints.complete()
    covered = [step for step in whole if step <= records.last_step]
    if len(covered) < len(whole):
        beyond = f"{records.folder.uri}/{LEDGER_FILE} ends at step {records.last_step}"
        if not covered:
            raise StorageError(f"{beyond}; the oldest checkpoint is of step {whole[0]}; allowed: the ledger of that "
                               "run, or another run.dir")
        tell(Notice(f"{beyond}: the run goes on from the checkpoint of step {covered[-1]}, and those after it are "
                    "deleted"))
    if records.last_step and not whole:
        tell(Notice(f"{records.folder.uri} has no whole checkpoint: the run begins again, and steps 1 to "
                    f"{records.last_step} of {LEDGER_FILE} are done again"))
    return checkpoints.manifest(covered[-1]) if covered else None


def first_samples(stream: Stream, num_samples: int) -> Sequence[Sample]:
    """Return the samples of the run's first batch, of any length; the stream goes back to its beginning."""
    batch = stream.next_batch(num_samples)
    stream.start_epoch(0)
    return batch.samples if batch else ()


def batches_of(num_rows: int, config: Config) -> int:
    """Return the batches of an epoch, if every row can be used."""
    whole, rest = divmod(num_rows, config.batch.global_samples)
    return max(1, whole + (rest > 0 and not config.batch.drop_last))


def schedule_step(step: int, cursor: Cursor, config: Config) -> float:
    """Return where the learning rate's schedule is at a step, whose batch ends at `cursor`: with `run.epochs` as far as
    in the rows, so that it ends with the run though some cannot be used.
    """
    if config.run.steps:
        return step
    num_batches, row = batches_of(cursor["num_rows"], config), cursor["row"]
    at_end = row == cursor["num_rows"]
    done = num_batches if at_end else min(num_batches, row / config.batch.global_samples)
    return cursor["epoch"] * num_batches + done


def warmup_warning(warmup_steps: int, total_steps: int) -> str:
    """Return a warning if a run ends before its learning rate has reached its peak; else ""."""
    if warmup_steps < total_steps:
        return ""
    return (f"warning: train.warmup_steps={warmup_steps}, and the run ends after step {total_steps}: its learning rate "
            f"only rises, to {total_steps / (warmup_steps + 1):.0%} of the peak; give fewer warm-up steps, or a longer "
            "run")


def describe(group: WorkerGroup, folder: Folder, device: str) -> None:
    """Learn where the workers are, and check that each of them reaches the run folder."""
    probe = f".reach-{uuid.uuid4().hex}"
    folder.write(probe, b"")
    try:
        with group.waits.on("the workers to start"):
            group.describe(device, probe)
    finally:
        folder.delete(probe)


def _opening(session: Session, last_step: int) -> tuple[str, ...]:
    config, group, nodes = session.config, session.group, len(set(session.group.nodes))
    return (
        f"model {config.model.preset or config.model.path}, {config.train.precision}; {session.stream.num_rows} "
        f"samples in {', '.join(source.path for source in data_sources(config.data))}",
        f"{counted(group.size, 'rank')} on {config.cluster.device}, {counted(nodes, 'node')}; "
        f"planner {config.planner.name}, sync {config.planner.sync}, at most {config.planner.tokens_per_rank} tokens a "
        "rank",
        f"resuming after step {last_step}" if last_step else f"new run in {config.run.dir}",
    )


def saves_ahead(done: int, total: int, every: int) -> int:
    """Return how many checkpoints a run writes after `done` of `total` steps: every `every`, and at the end."""
    if done >= total:
        return 0
    return (total // every - done // every + (total % every > 0)) if every else 1


def check_room(members: Sequence[WorkerHandle], config: Config, run_folder: Path | None, num_present: int,
               num_ahead: int) -> None:
    """Refuse a run that could not save. `run_folder` needs room for as many checkpoints as it will hold beyond the
    `num_present` whole ones; without it, each node needs room for its parts of one, in TMPDIR.
    """
    if not num_ahead:
        return
    whole_bytes = members[0].described["checkpoint_bytes"]
    free = [member.described["save_free_bytes"] for member in members]
    if run_folder is not None:  # one file system for all; the checkpoint under way is added to those kept
        count = min(num_ahead, config.checkpoint.keep + 1 - min(num_present, config.checkpoint.keep))
        if count * whole_bytes > min(free):
            raise RunError(f"run.dir: {run_folder} has {gib(min(free))} free, and the next {count} checkpoints of "
                           f"{gib(whole_bytes)} each need {gib(count * whole_bytes)} "
                           f"(checkpoint.keep={config.checkpoint.keep} and the one being written); make room, lower "
                           "checkpoint.keep, or choose another run.dir")
        return
    ranks_of = Counter(member.described["node_id"] for member in members)
    for member, free_bytes in zip(members, free):
        count = ranks_of[member.described["node_id"]]
        need = count * math.ceil(whole_bytes / len(members))
        if need > free_bytes:
            raise RunError(f"run.dir: the folder for temporary files on node {member.described['node_id']} has "
                           f"{gib(free_bytes)} free, and the parts of its {count} ranks in a checkpoint need "
                           f"{gib(need)} before they are uploaded; make room, or name another folder in TMPDIR when "
                           "Ray starts there")


def kept_cost(folder: Folder, strategy: Strategy, mode: Mode) -> tuple[CostFile | None, str]:
    """Return the costs that an earlier start left, if they are of this run; else why they are not (empty: none)."""
    if not folder.exists(COST_FILE):
        return None, ""
    try:
        file = CostFile.parsed(constants_of_text(folder.read(COST_FILE), COST_FILE), COST_FILE)
    except PlanError as error:
        return None, str(error).removeprefix(f"{COST_FILE}: ")
    if file.origin is None:
        return None, "it does not say what it was measured on"
    other = strategy.difference_from(file.origin, mode)
    return (None, other) if other else (file, "")


def cost_notice(kept: CostFile | None, reason: str, takes_over: bool) -> str:
    """Return what to tell the user of `kept_cost`. A driver that takes over measures nothing: the workers train."""
    if kept or not (reason or takes_over):
        return ""
    if not takes_over:
        return f"{COST_FILE} is not used, costs are measured again: {reason}"
    why = reason or "the driver was lost before it was written"
    return f"{COST_FILE} is not used: {why}; the run goes on without measured costs, and its next start measures them"


def measure_costs(session: Session, mode: Mode, generation: int) -> CostFile:
    """Measure costs on the workers, in a generation of their own, and write them to the run folder."""
    group, folder, strategy = session.group, session.records.folder, session.strategy
    session.tell(Notice(f"measuring costs on {group.size} workers, for {COST_FILE} (planner.cost=measure)"))
    found = measured_session(group, session.store, generation, session.pool_groups, mode,
                             int(session.config.planner.tokens_per_rank))
    try:
        measured = cost_file.measured_cost([found], strategy.origin(mode), strategy.memory(mode), strategy.cost(mode),
                                           model_name(session.config))
    except MeasureError as error:
        raise RunError(f"planner.cost: got measure; {error}") from None
    text = measured.text()
    folder.write(COST_FILE, text.encode())
    picture = BytesIO()
    measured.draw(picture)
    folder.write(COST_PICTURE, picture.getvalue())
    errors = measured.sections["errors"]["packs"]
    session.tell(Notice(f"costs measured: packs are off by {100 * errors['median']:.1f} % in the median; kept in "
                        f"{COST_FILE}"))
    return CostFile.parsed(yaml.safe_load(text), COST_FILE)  # rounded as later starts read it


def measured_session(
    group: WorkerGroup, store: tuple[str, int], generation: int, pool_groups: int, mode: Mode, tokens_per_rank: int,
    parts: Sequence[str] = PARTS, tell: Callable[[str, int], object] = lambda part, done: None,
) -> cost_file.MeasuredSession:
    """Measure in a generation of its own, after which the state is useless. `tell` gets each part, and its number."""
    with group.waits.on("the workers to load the model and to meet"):
        group.collect(group.join(generation, store, (), pool_groups, mode, [FromCheckpoint()] * group.size, 0))
    results: dict[str, Sequence[PartResult]] = {}
    spec: Spec
    for number, part in enumerate(parts):
        tell(part, number)
        with group.waits.on(f"costs to be measured ({part}, {number + 1} of {len(parts)})"):
            found = group.call("measure", part, tokens_per_rank)
        spec = found[0][0]
        if found[0][1] is not None:
            results[part] = [result for _, result in found]
    group.call("leave")
    return cost_file.MeasuredSession(spec, results)
