"""What must fit before a run trains: the resident state in device memory, and the checkpoints where they are written.
And what follows from a device's memory and the run's model: tokens a rank of each generation, and its costs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.config import CONF, Config
from dhp_ray.data.processor import SLICE_TOKENS
from dhp_ray.planner.cost import SYNCS, CostModel
from dhp_ray.planner.derived_cost import Device, derived_cost, described
from dhp_ray.planner.memory import MemoryModel, MemorySettings
from dhp_ray.planner.model_shape import ModelShape
from dhp_ray.runtime.driver.group import Member, WorkerGroup
from dhp_ray.runtime.messages import RunError

MEMORY_SHARE = 0.9
"""Share of a device's memory that is planned with; the rest is the allocator's and the libraries'."""

NOT_DESCRIBED = {"cuda": "a100.yaml", "npu": "ascend_910b.yaml"}
"""What a device is reckoned as that no file of conf/device describes."""


def memory_model(config: Config, group: WorkerGroup) -> MemoryModel:
    """What a rank of this group needs to train the run's model."""
    described, train = group.members[0].described, config.train
    shape: ModelShape = described["shape"]
    device = ACCELERATORS[described["device"]]
    pooled = device.pool_groups(config.comm.pool_groups, group.memory_bytes) if config.comm.transport == "pool" else 0
    num_groups = min(pooled, 2**group.size - group.size - 1)  # sets of two ranks and more
    tokens = config.planner.tokens_per_rank
    return MemoryModel(shape, MemorySettings(
        sync=config.planner.sync, world_size=group.size, precision=train.precision,
        recomputes=train.activation_checkpointing, frozen=tuple(train.freeze), device=device.name,
        bucket_bytes=int(train.bucket_mb * 2**20), mirror_every_steps=config.elastic.mirror_every_steps,
        largest_image=max(SLICE_TOKENS, config.data.max_pixels // shape.token_pixels),
        image_limit=None if tokens == "auto" else int(tokens),
        communicators_bytes=num_groups * device.group_bytes))


def tokens_that_fit(config: Config, group: WorkerGroup) -> int:
    """Tokens of a pack that a rank's memory holds beside the resident state, whatever they are.

    Raises:
        RunError: not even one.
    """
    memory, limit_bytes = memory_model(config, group), MEMORY_SHARE * group.memory_bytes
    tokens = memory.tokens_that_fit(limit_bytes)
    if tokens < 1:
        needed = memory.memory(memory.worst_load(1))
        raise RunError(
            f"planner.tokens_per_rank: got auto, and a rank has room for no token: it needs "
            f"{_gib(needed.device_bytes)}, {_gib(sum(needed.resident.values()))} of them for the state, and has "
            f"{_gib(limit_bytes)} ({MEMORY_SHARE:.0%} of its device); use more or larger devices, or a smaller model"
        )
    return tokens


def cost_of(config: Config, group: WorkerGroup) -> CostModel:
    """The cost file of `planner.cost`; without one, on CUDA and NPU, what follows from the run's own model and the
    published figures of its slowest device; on the CPU the measured file.

    A device that nobody has described is reckoned as another one of its kind; the cost's `source` says so.
    """
    kind = group.members[0].described["device"]
    if config.planner.cost or kind not in NOT_DESCRIBED:
        return CostModel.load(config.planner.cost or str(CONF / "cost" / f"{kind}.yaml"))
    memory, num_nodes = memory_model(config, group), len(set(group.nodes))
    costs = []
    for name in sorted({member.described["device_name"] for member in group.members}):
        device = described(CONF / "device", name)
        cost = derived_cost(memory, device or Device.load(CONF / "device" / NOT_DESCRIBED[kind]), num_nodes)
        costs.append(cost if device else replace(cost, source=f"{cost.source}; {name} is not in conf/device"))
    return max(costs, key=lambda cost: cost.linear_s)


def tokens_of_generation(config: Config, group: WorkerGroup, num_ranks: int) -> int:
    """Tokens of a pack that each of so many ranks like these holds: no more than at the run's first start, since fewer
    ranks keep larger shards."""
    memory = memory_model(config, group)
    fewer = MemoryModel(memory.shape, replace(memory.settings, world_size=num_ranks))
    return max(1, min(int(config.planner.tokens_per_rank), fewer.tokens_that_fit(MEMORY_SHARE * group.memory_bytes)))


def ranks_that_hold(config: Config, group: WorkerGroup, max_ranks: int) -> Callable[[int], int]:
    """How many ranks hold a sequence of so many tokens, where tokens a rank follow the number of ranks; more than
    `max_ranks` where these do not."""
    tokens_of = cache(partial(tokens_of_generation, config, group))
    return lambda num_tokens: 1 + bisect_left(
        range(1, max_ranks + 1), num_tokens, key=lambda num_ranks: num_ranks * tokens_of(num_ranks))


def within_memory(config: Config, group: WorkerGroup, cost: CostModel, auto: bool) -> tuple[int, CostModel]:
    """Tokens of a pack on one rank of this generation, and the cost with this model's memory in it.

    `auto`: no more than this generation's ranks hold; a batch that then fits no more waits for others to come.
    """
    memory = memory_model(config, group)
    tokens = tokens_of_generation(config, group, group.size) if auto else int(config.planner.tokens_per_rank)
    resident = {sync: sum(MemoryModel(memory.shape, replace(memory.settings, sync=sync)).resident().values())
                for sync in SYNCS}
    pack_bytes = sum(memory.memory(memory.worst_load(tokens)).pack.values())
    return tokens, replace(cost, memory_bytes_per_token=pack_bytes / tokens, resident_bytes=resident)


def check_memory(group: WorkerGroup, sync: str) -> None:
    """Refuse a model whose resident state leaves no room on a rank."""
    for rank, member in enumerate(group.members):
        resident_bytes, num_parameters = member.described["resident_bytes"], member.described["num_parameters"]
        if resident_bytes > MEMORY_SHARE * group.memory_bytes:
            other = "planner.sync=micro_batch, " if sync == "step" else ""
            raise RunError(
                f"model of {num_parameters / 1e9:.2f} B parameters: "
                f"planner.sync={sync} keeps {resident_bytes / 2**30:.1f} GiB on each rank, "
                f"rank {rank} has {group.memory_bytes / 2**30:.1f} GiB; "
                f"use more or larger devices, {other}or a smaller model"
            )


def saves_ahead(done: int, total: int, every: int) -> int:
    """Checkpoints that a run will write after `done` of `total` steps: one every so many (0: none), one at the end."""
    if done >= total:
        return 0
    return (total // every - done // every + (total % every > 0)) if every else 1


def check_room(
    members: Sequence[Member], config: Config, run_folder: Path | None, num_present: int, num_ahead: int
) -> None:
    """Refuse a run that could not save: as many checkpoints as it will hold at a time in `run_folder`, or each node's
    parts of one to be uploaded.

    `num_present`: whole checkpoints that the folder has already, of those that are kept.

    Raises:
        RunError: what is needed, what is free, which key.
    """
    if not num_ahead:
        return
    whole_bytes = members[0].described["checkpoint_bytes"]
    free = [member.described["save_free_bytes"] for member in members]
    if run_folder is not None:  # one file system for all; the one under way comes beside those that are kept
        count = min(num_ahead, config.checkpoint.keep + 1 - min(num_present, config.checkpoint.keep))
        if count * whole_bytes > min(free):
            raise RunError(
                f"run.dir: {run_folder} has {_gib(min(free))} free, and the next {count} checkpoints of "
                f"{_gib(whole_bytes)} each need {_gib(count * whole_bytes)} "
                f"(checkpoint.keep={config.checkpoint.keep} and the one being written); "
                "make room, lower checkpoint.keep, or choose another run.dir"
            )
        return
    ranks_of = Counter(member.described["node_id"] for member in members)
    for member, free_bytes in zip(members, free):
        count = ranks_of[member.described["node_id"]]
        need = count * math.ceil(whole_bytes / len(members))
        if need > free_bytes:
            folder, node_id = config.checkpoint.scratch or "the folder for temporary files", member.described["node_id"]
            raise RunError(
                f"checkpoint.scratch: {folder} on node {node_id} has {_gib(free_bytes)} free, and the parts of its "
                f"{count} ranks in a checkpoint need {_gib(need)} before they are uploaded; "
                "make room, or name another folder"
            )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
