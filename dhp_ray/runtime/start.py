"""What happens before the first step: the run folder is opened, the workers join, the data stream takes up its place."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import Any

from dhp_ray.config import CONF, Config, ConfigError, dump
from dhp_ray.data.index import sources_of
from dhp_ray.data.mixture import Mixture, open_stream
from dhp_ray.data.stream import Stream
from dhp_ray.planner import PLANNERS, CostModel, warm_up
from dhp_ray.planner.plan import ClusterSpec
from dhp_ray.runtime.checkpoints import Checkpoints
from dhp_ray.runtime.dispatch import Dispatcher
from dhp_ray.runtime.evaluation import Evaluation, held_out_stream
from dhp_ray.runtime.group import WorkerGroup
from dhp_ray.runtime.messages import Message, Notice, RunError, Started
from dhp_ray.runtime.records import RunRecords
from dhp_ray.runtime.tensorboard import ScalarLog
from dhp_ray.storage import Folder

MEMORY_SHARE = 0.9
"""Share of a device's memory that is planned with; the rest is the allocator's and the communicators'."""


@dataclass
class Session:
    """A run that is ready for its next step."""

    records: RunRecords
    checkpoints: Checkpoints
    scalars: ScalarLog
    dispatcher: Dispatcher
    evaluation: Evaluation
    generation: int
    first_step: int
    total_steps: int


def open_session(config: Config, group: WorkerGroup, store: tuple[str, int]) -> Generator[Message, None, Session]:
    """Open or resume the run of `run.dir`; yields what the user should see, returns the session.

    Raises:
        RunError, ConfigError, StorageError, DataError: one line each.
    """
    Thread(target=warm_up, name="planner-warm-up", daemon=True).start()  # compiled by the time the workers are up
    folder = Folder(config.run.dir)
    folder.probe()
    records, checkpoints = RunRecords(folder), Checkpoints(folder, config.checkpoint.keep)
    records.compare_config(config)
    newest = checkpoints.newest()
    resumed_step = newest.step if newest else 0
    if config.planner.name not in PLANNERS:
        raise ConfigError(f"planner.name: got {config.planner.name!r}; allowed: {', '.join(PLANNERS)}")
    cost = CostModel.load(config.planner.cost or str(CONF / "cost" / f"{config.cluster.device}.yaml"))
    stream = open_stream(config.data, config.model, config.seed, drop_last=config.batch.drop_last)
    if newest:
        stream.restore(newest.cursor)
    held_out = held_out_stream(config)

    yield Notice(f"starting {config.cluster.num_workers} workers on {config.cluster.device}")
    probe = f".reach-{uuid.uuid4().hex}"
    folder.write(probe, b"")
    try:
        group.describe(config.cluster.device, probe)
    finally:
        folder.delete(probe)
    check_memory(group, config.planner.sync)
    resolve_limits(config, records.stored_config(), cost, group)
    stream.max_tokens = config.planner.max_sequence_tokens
    stream.max_image_tokens = int(config.planner.tokens_per_rank)
    records.write_config(config)
    checkpoints.discard_after(resumed_step)
    records.truncate(resumed_step)

    generation = 1
    group.join(generation, store, checkpoints.name(resumed_step) if newest else "")
    records.cluster(generation, group.membership())
    cluster = ClusterSpec(len(group.workers), group.ranks_per_node, int(config.planner.tokens_per_rank))
    steps = config.run.steps
    total_steps = steps or config.run.epochs * -(-stream.num_rows // config.batch.global_samples)
    dispatcher = Dispatcher(stream, group, cluster, cost, config)
    evaluation = Evaluation(held_out, group, cluster, cost, config)
    scalars = ScalarLog(folder.child("tensorboard"), resumed_step + 1)
    scalars.text("configuration", f"```yaml\n{dump(config)}\n```")
    records.event("started", generation=generation, step=resumed_step + 1, num_ranks=cluster.num_ranks)
    yield Started(_opening(config, group, stream, resumed_step), resumed_step + 1, total_steps)
    return Session(records, checkpoints, scalars, dispatcher, evaluation, generation, resumed_step + 1, total_steps)


def resolve_limits(config: Config, stored: Mapping[str, Any], cost: CostModel, group: WorkerGroup) -> None:
    """Fix the run's limits at its first start; later starts read them back from the run folder (`stored`).

    Raises:
        RunError: auto finds no number.
    """
    planner = config.planner
    if planner.tokens_per_rank == "auto":
        planner.tokens_per_rank = str(stored.get("planner.tokens_per_rank") or tokens_that_fit(cost, group))
    if not planner.max_sequence_tokens:
        planner.max_sequence_tokens = int(stored.get("planner.max_sequence_tokens") or int(planner.tokens_per_rank) * len(group.workers))


def tokens_that_fit(cost: CostModel, group: WorkerGroup) -> int:
    """Tokens of a pack that a rank's memory holds beside the resident state."""
    free_bytes = MEMORY_SHARE * group.memory_bytes - max(member["resident_bytes"] for member in group.members)
    tokens = int(free_bytes / cost.memory_bytes_per_token) if cost.memory_bytes_per_token else 0
    if tokens < 1:
        raise RunError("planner.tokens_per_rank: got auto, and memory_bytes_per_token of the cost file gives no number; allowed: a number of tokens")
    return tokens


def check_memory(group: WorkerGroup, sync: str) -> None:
    """Refuse a model whose resident state leaves no room on a rank."""
    for rank, member in enumerate(group.members):
        if member["resident_bytes"] > MEMORY_SHARE * group.memory_bytes:
            other = "planner.sync=micro_batch, " if sync == "step" else ""
            raise RunError(
                f"model of {member['num_parameters'] / 1e9:.2f} B parameters: planner.sync={sync} keeps {member['resident_bytes'] / 2**30:.1f} GiB "
                f"on each rank, rank {rank} has {group.memory_bytes / 2**30:.1f} GiB; use more or larger devices, {other}or a smaller model")


def _opening(config: Config, group: WorkerGroup, stream: Stream | Mixture, resumed_step: int) -> tuple[str, ...]:
    nodes = len({member["node_id"] for member in group.members})
    model = config.model.preset or config.model.path
    return (
        f"model {model}, {config.train.precision}; {stream.num_rows} samples in {', '.join(source.path for source in sources_of(config.data))}",
        f"{len(group.workers)} ranks on {config.cluster.device}, {nodes} node{'s' if nodes > 1 else ''}; "
        f"planner {config.planner.name}, sync {config.planner.sync}, at most {config.planner.tokens_per_rank} tokens a rank",
        f"resuming after step {resumed_step}" if resumed_step else f"new run in {config.run.dir}",
    )
