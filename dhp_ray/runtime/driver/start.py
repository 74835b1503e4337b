"""What happens before the first step: the run folder is opened, the workers join, the data stream moves to its
position.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from io import BytesIO
from threading import Thread
from typing import Any

import yaml

from dhp_ray.config import RESOLVED, Config, dump
from dhp_ray.data.blocks import start_servers
from dhp_ray.data.index import sources_of
from dhp_ray.data.stream import Stream
from dhp_ray.measure import cost_file
from dhp_ray.measure.fitting import MeasureError
from dhp_ray.measure.rounds import PARTS, PartResult, Spec
from dhp_ray.planner import warm_up
from dhp_ray.planner.cost.model import SYNCS, constants_of_text
from dhp_ray.planner.cost.origin import CostFile
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.mode import Mode
from dhp_ray.planner.plan.types import Sample, samples_from_json
from dhp_ray.run_folder import COST_FILE, COST_PICTURE, LEDGER_FILE, TENSORBOARD_FOLDER
from dhp_ray.runtime.driver.elastic import Condition
from dhp_ray.runtime.driver.evaluation import open_held_out
from dhp_ray.runtime.driver.group import WorkerGroup
from dhp_ray.runtime.driver.image_limits import image_limit_of, image_tokens_of, skipped_images
from dhp_ray.runtime.driver.modes import (
    Choice,
    check_cost,
    compares_modes,
    cost_of,
    difference_from,
    has_fused_operators,
    memory_of,
    mode_of,
)
from dhp_ray.runtime.driver.recovery import PendingWorkers, take_over
from dhp_ray.runtime.driver.room import (
    check_host_memory,
    check_memory,
    check_room,
    limits_as_given,
    limits_of_generation,
    saves_ahead,
    tokens_that_fit,
)
from dhp_ray.runtime.driver.session import LOOKS_PER_HANG, Session
from dhp_ray.runtime.messages import FromCheckpoint, Notice, RunError, RunStarted, Tell
from dhp_ray.runtime.origins import model_name, origin_of
from dhp_ray.runtime.records.checkpoints import Checkpoints, Manifest
from dhp_ray.runtime.records.run_records import RunRecords
from dhp_ray.runtime.records.tensorboard import ScalarLog
from dhp_ray.runtime.records.watch import Watch
from dhp_ray.schema import MEASURE
from dhp_ray.storage import Folder, StorageError


def open_session(config: Config, folder: Folder, group: WorkerGroup, store: tuple[str, int], pending: PendingWorkers,
                 takes_over: bool, tell: Tell, stopping: Callable[[], str]) -> Session:
    """Open or resume the run of `run.dir`, which is `folder`.

    `takes_over`: the workers hold the state of this run, whose driver was lost; they keep it. `stopping` returns why to
    end early.

    Raises:
        RunError, ConfigError, StorageError, DataError: one line each.
    """
    compiled = _compiled()  # done by the time the workers are up
    try:
        with group.waits.on("run.dir"):
            folder.probe()
    except StorageError as error:
        raise StorageError(f"run.dir: {error}") from None
    records, checkpoints = RunRecords(folder), Checkpoints(folder, config.checkpoint.keep)
    if not takes_over:
        records.compare_config(config)
    newest = None if takes_over else covered_checkpoint(records, checkpoints, tell)
    first_step = 1 + (records.last_step if takes_over else newest.step if newest else 0)
    with group.waits.on("the index of the data"):
        stream = Stream(config.data, config.model, config.seed, drop_last=config.batch.drop_last)
        held_out = open_held_out(config)
    start_servers()
    # before the workers report how much space is free
    not_deleted = [] if takes_over else checkpoints.discard_after(first_step - 1)
    if takes_over:
        take_over(group, pending, config.elastic.hang_s / LOOKS_PER_HANG,
                  lambda: describe(group, folder, config.cluster.device), stopping, tell)
    else:
        tell(Notice(f"starting {config.cluster.num_workers} workers on {config.cluster.device}"))
        describe(group, folder, config.cluster.device)
    for line in dict.fromkeys(filter(None, (member.described.get("told") for member in group.members))):
        tell(Notice(line))
    auto_tokens = config.planner.tokens_per_rank == "auto"
    stored = records.stored_config()
    if compares_modes(config, group, recorded_sync(config, stored)):
        with group.waits.on("the planner's loops, which are being compiled"):
            group.wait(compiled)
        with group.waits.on("the first batch"):
            planned = samples_from_json(records.planned_samples(1))
            group.first_batch = planned or first_samples(stream, config.batch.global_samples)
    largest = image_tokens_of(config, group)
    choice = resolve_limits(config, stored, group, takes_over)
    limit = image_limit_of(config, group)
    if line := skipped_images(limit, largest):
        tell(Notice(line))
    if not takes_over:
        check_cost(config, group, choice.mode)
    stream.limit(config.planner.max_sequence_tokens, limit)
    scalars = ScalarLog(folder.child(TENSORBOARD_FOLDER), first_step)
    steps = config.run.steps
    total_steps = steps or config.run.epochs * batches_of(stream.num_rows, config)
    watch = Watch(folder, config.watch.every_steps)
    session = Session(config, group, store, records, checkpoints, scalars, watch, stream, held_out,
                      total_steps, compiled, tell, choice, stop_reason=stopping, auto_tokens=auto_tokens)
    if config.planner.cost == MEASURE:
        group.measured_cost, reason = kept_cost(config, folder, group, choice.mode)
        if reason:
            tell(Notice(f"{COST_FILE} is not used{'' if takes_over else ', costs are measured again'}: {reason}"))
    if takes_over:
        session.history.stream_lost = True
        session.history.refits.restore(records.planned_cost())
        if not records.stored_config():  # the driver was lost before the first step
            records.write_config(config, group.image_limit)
        session.current.number = records.generation
        session.choose_mode()
        session.plan_for_group()
        session.history.step_times_s.extend(records.last_step_times_s())
        here = {(member.described["node_id"], member.described["pid"]) for member in group.members}
        for rank in records.ranks:
            if (rank["node_id"], rank["pid"]) not in here:  # no survey shows those lost with the driver
                records.event("worker_lost", rank=rank["rank"], pid=rank["pid"], node_id=rank["node_id"],
                              condition=str(Condition.DEAD), error="", last_mark="")
        group.waits.keep(records.waited)
        return session
    session.note_not_deleted(not_deleted)
    check_room(group.members, config, folder.local_path(), len(checkpoints.complete()),
               saves_ahead(first_step - 1, total_steps, config.checkpoint.every_steps))
    records.write_config(config, group.image_limit)
    group.waits.keep(records.waited)
    records.truncate(first_step - 1)
    if newest:
        stream.restore(newest.cursor)
        session.history.refits.restore(newest.cost.get("terms", {}), newest.cost.get("prior"))
    origin = FromCheckpoint(newest.files if newest else "")
    generation = records.generation + 1  # one after those of earlier starts
    mode = session.choose_mode()
    if config.planner.cost == MEASURE and not group.measured_cost:
        group.measured_cost = measure_costs(config, folder, group, mode, generation, store, session.pool_groups, tell)
        generation += 1
    with group.waits.on("the workers to load the model and to meet"):
        group.collect(group.join(generation, store, session.replica_ranks, session.pool_groups,
                                 mode, [origin] * group.size, first_step - 1))
    session.enter(generation)
    scalars.text("configuration", f"```yaml\n{dump(config)}\n```")
    scalars.hyperparameters(config)
    records.event("started", generation=generation, step=first_step, num_ranks=group.size)
    tell(RunStarted(_opening(config, group, stream, first_step - 1), first_step, total_steps))
    return session


def covered_checkpoint(records: RunRecords, checkpoints: Checkpoints, tell: Tell) -> Manifest | None:
    """Return the newest checkpoint that the ledger covers, from which a run goes on; None if there are no checkpoints.
    Says so if there are newer ones.

    Raises:
        StorageError: there are newer ones alone.
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
    return checkpoints.manifest(covered[-1]) if covered else None


def _compiled() -> Future[float]:
    """Compile the planner's loops in a thread; the future has the seconds that it took."""
    done: Future[float] = Future()

    def compile_loops() -> None:
        try:
            done.set_result(warm_up())
        except BaseException as error:  # for the code that waits for it
            done.set_exception(error)

    Thread(target=compile_loops, name="planner-warm-up", daemon=True).start()
    return done


def first_samples(stream: Stream, num_samples: int) -> Sequence[Sample]:
    """Return the samples of the run's first batch, of any length; the stream goes back to its beginning.

    Raises:
        DataError: they cannot be read.
    """
    batch = stream.next_batch(num_samples)
    stream.start_epoch(0)
    return batch.samples if batch else ()


def batches_of(num_rows: int, config: Config) -> int:
    """Return the batches of an epoch, if every row can be used."""
    whole, rest = divmod(num_rows, config.batch.global_samples)
    return max(1, whole + (rest > 0 and not config.batch.drop_last))


def describe(group: WorkerGroup, folder: Folder, device: str) -> None:
    """Learn where the workers are, and check that each of them reaches the run folder."""
    probe = f".reach-{uuid.uuid4().hex}"
    folder.write(probe, b"")
    try:
        with group.waits.on("the workers to start"):
            group.describe(device, probe)
    finally:
        folder.delete(probe)


def resolve_limits(
    config: Config, stored: Mapping[str, Any], group: WorkerGroup, takes_over: bool = False
) -> Choice:
    """Fix the run's limits and how its ranks synchronise at its first start; later starts read them back from the run
    folder (`stored`). Returns the mode that the workers are to start in.

    `takes_over`: `group` has the remaining workers of a run that goes on; it may still wait for others.

    Raises:
        RunError: the model does not fit, or auto finds no value.
    """
    planner, auto_tokens = config.planner, config.planner.tokens_per_rank == "auto"
    planner.max_sequence_tokens = planner.max_sequence_tokens or int(stored.get("planner.max_sequence_tokens") or 0)
    if auto_tokens:
        planner.tokens_per_rank = str(stored.get("planner.tokens_per_rank") or "auto")
    # older runs have it as a key
    group.image_limit = int(stored.get(f"{RESOLVED}.image_limit") or stored.get("planner.max_image_tokens") or 0)
    recorded = recorded_sync(config, stored)
    planner.sync = recorded or planner.sync
    choice = mode_of(config, group, auto_tokens)
    if recorded:
        choice = choice._replace(keys=("planner.sync", *choice.keys), why="; ".join(
            ["planner.sync as at the run's first start", *filter(None, [choice.why])]))
    planner.sync = choice.mode.sync
    group.image_limit = memory_of(config, group, choice.mode).settings.image_limit or 0
    if not takes_over:
        check_memory(config, group, choice.mode)
    if planner.tokens_per_rank == "auto":
        planner.tokens_per_rank = str(tokens_that_fit(config, group))
    if not planner.max_sequence_tokens:
        limits = limits_of_generation(config, group, group.size) if auto_tokens else limits_as_given(
            config, group, choice.mode)
        planner.max_sequence_tokens = limits.most_tokens * group.size
    if not takes_over:
        check_host_memory(config, group, choice.mode)
    return choice


def recorded_sync(config: Config, stored: Mapping[str, Any]) -> str:
    """Return what `planner.sync=auto` resolved to at the run's first start; empty if sync is not auto, or this is the
    first start.
    """
    found = stored.get("planner.sync")
    return str(found) if config.planner.sync == "auto" and found in SYNCS else ""


def _opening(config: Config, group: WorkerGroup, stream: Stream, resumed_step: int) -> tuple[str, ...]:
    nodes = len(set(group.nodes))
    model = config.model.preset or config.model.path
    return (
        f"model {model}, {config.train.precision}; {stream.num_rows} samples in "
        f"{', '.join(source.path for source in sources_of(config.data))}",
        f"{group.size} ranks on {config.cluster.device}, {nodes} node{'s' if nodes > 1 else ''}; "
        f"planner {config.planner.name}, sync {config.planner.sync}, at most {config.planner.tokens_per_rank} tokens a "
        "rank",
        f"resuming after step {resumed_step}" if resumed_step else f"new run in {config.run.dir}",
    )


def kept_cost(config: Config, folder: Folder, group: WorkerGroup, mode: Mode) -> tuple[CostFile | None, str]:
    """Return the costs that an earlier start left in the run folder, if they are of this run; else the reason why they
    are not used (empty: there are none).
    """
    if not folder.exists(COST_FILE):
        return None, ""
    try:
        file = CostFile.parsed(constants_of_text(folder.read(COST_FILE), COST_FILE), COST_FILE)
    except PlanError as error:
        return None, str(error).removeprefix(f"{COST_FILE}: ")
    if file.origin is None:
        return None, "it does not say what it was measured on"
    other = difference_from(file.origin, config, group, memory_of(config, group, mode))
    return (None, other) if other else (file, "")


def measure_costs(
    config: Config, folder: Folder, group: WorkerGroup, mode: Mode, generation: int, store: tuple[str, int],
    pool_groups: int, tell: Tell,
) -> CostFile:
    """Measure costs on the workers, in a generation of their own, and write them to the run folder.

    Raises:
        RunError: too little could be measured, or a worker failed.
    """
    memory = memory_of(config, group, mode)
    tell(Notice(f"measuring costs on {group.size} workers, for {COST_FILE} (planner.cost=measure)"))
    with group.waits.on("the workers to load the model and to meet"):
        group.collect(group.join(generation, store, (), pool_groups, mode, [FromCheckpoint()] * group.size, 0))
    results: dict[str, Sequence[PartResult]] = {}
    spec: Spec
    for number, part in enumerate(PARTS, 1):
        with group.waits.on(f"costs to be measured ({part}, {number} of {len(PARTS)})"):
            found = group.call("measure", part, int(config.planner.tokens_per_rank))
        spec = found[0][0]
        if found[0][1] is not None:
            results[part] = [result for _, result in found]
    group.call("leave")
    described = group.members[0].described
    origin = origin_of(config, memory, described["device"], described["device_name"], group.size,
                       has_fused_operators(group))
    try:
        known = cost_of(replace(config, planner=replace(config.planner, cost="")), group, mode)
        measured = cost_file.measured_cost([cost_file.Session(spec, results)], origin, memory, known,
                                           model_name(config))
    except MeasureError as error:
        raise RunError(f"planner.cost: got measure; {error}") from None
    text = measured.text()
    folder.write(COST_FILE, text.encode())
    picture = BytesIO()
    measured.draw(picture)
    folder.write(COST_PICTURE, picture.getvalue())
    errors = measured.sections["errors"]["packs"]
    tell(Notice(f"costs measured: packs are off by {100 * errors['median']:.1f} % in the median; kept in {COST_FILE}"))
    return CostFile.parsed(yaml.safe_load(text), COST_FILE)  # rounded as later starts read it
