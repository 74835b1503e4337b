"""What must fit before a run trains: the resident state in device memory, what ranks keep in their node's memory, and
checkpoints in the folder where they are written. Also the tokens per rank of each generation, which follow from a
device's memory and the run's model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from dhp_ray.config import Config
from dhp_ray.planner.cost.derived import with_encoder_apart
from dhp_ray.planner.cost.model import SYNCS, CostModel
from dhp_ray.planner.memory.host import node_terms
from dhp_ray.planner.memory.model import MemoryModel
from dhp_ray.planner.mode import MEMORY_SHARE, Mode
from dhp_ray.runtime.driver.group import Member, WorkerGroup
from dhp_ray.runtime.driver.host_room import (
    OFFLOAD,
    Limits,
    node_limit,
    offload_of,
    plain_tokens,
    recomputation_of,
    share_of_every_pack,
)
from dhp_ray.runtime.driver.modes import cost_of, memory_of, mode_of, most_tokens_of
from dhp_ray.runtime.messages import RunError


def tokens_that_fit(config: Config, group: WorkerGroup) -> int:
    """Return the tokens of a pack that a rank's memory holds in addition to the resident state, whatever they are.

    Raises:
        RunError: not even one fits.
    """
    memory = memory_of(config, group, mode_of(config, group, auto_tokens=True).mode)
    limit_bytes = MEMORY_SHARE * group.memory_bytes
    tokens = _fitting(config, memory, group)
    if plain_tokens(config, memory, group) < 1:
        needed = memory.memory(memory.worst_load(1))
        raise RunError(
            f"planner.tokens_per_rank: got auto, and a rank has room for no token: it needs "
            f"{_gib(needed.device_bytes)}, {_gib(sum(needed.resident.values()))} of them for the state, and has "
            f"{_gib(limit_bytes)} ({MEMORY_SHARE:.0%} of its device); use more or larger devices, or a smaller model"
        )
    return tokens


def limits_of_generation(config: Config, group: WorkerGroup, num_ranks: int) -> Limits:
    """Return what each of `num_ranks` ranks like these holds of a pack: at most the tokens of the run's first start,
    or, if that is more, what its longest sequence needs on that many ranks; and what it holds beyond that with
    activations in host memory or recomputed layers.
    """
    return _limits_in(config, group, num_ranks, mode_of(config, group, True, num_ranks).mode)


def _limits_in(config: Config, group: WorkerGroup, num_ranks: int, mode: Mode) -> Limits:
    memory = memory_of(config, group, mode, num_ranks)
    most = max(int(config.planner.tokens_per_rank), math.ceil(config.planner.max_sequence_tokens / num_ranks))
    tokens = max(1, min(most, _fitting(config, memory, group)))
    offload = offload_of(config, memory, group, tokens)
    return Limits(tokens, offload, recomputation_of(config, memory, group, offload, tokens))


def limits_as_given(config: Config, group: WorkerGroup, mode: Mode) -> Limits:
    """Return the limits for `planner.tokens_per_rank`: tokens that the devices do not hold are held with activations in
    host memory, or recomputed, if they may be.
    """
    tokens, memory = int(config.planner.tokens_per_rank), memory_of(config, group, mode)
    if share_of_every_pack(config):
        return Limits(tokens, offload_of(config, memory, group, tokens))
    fitting = max(1, min(tokens, plain_tokens(config, memory, group)))
    offload = offload_of(config, memory, group, fitting, tokens)
    recomputation = recomputation_of(config, memory, group, offload, fitting, tokens)
    return Limits(fitting if offload.share or recomputation.share else tokens, offload, recomputation)


def _fitting(config: Config, memory: MemoryModel, group: WorkerGroup) -> int:
    """Return the tokens of a pack that each rank's device holds, at least 1. On the CPU, packs are in the node's
    memory, together with all that its ranks keep there. (On other devices `check_host_memory` refuses what a node has
    no room for.)
    """
    device_tokens, share = plain_tokens(config, memory, group), share_of_every_pack(config)
    if memory.settings.device != "cpu":
        return max(1, device_tokens)

    def too_many(tokens: int) -> bool:
        pack_bytes = sum(memory.memory(memory.worst_load(tokens, share)).pack.values())
        return any(sum(node_terms(memory, tokens, count, share).values()) + count * pack_bytes
                   > node_limit(group, node_id) for node_id, count in Counter(group.nodes).items())

    return max(1, bisect_left(range(1, device_tokens + 1), True, key=too_many))


def ranks_that_hold(config: Config, group: WorkerGroup, max_ranks: int) -> Callable[[int], int]:
    """Return a function that tells how many ranks hold a sequence of a number of tokens, where tokens per rank follow
    the number of ranks; it returns more than `max_ranks` if these do not hold it.
    """
    most_of = cache(lambda num_ranks: most_tokens_of(config, group, num_ranks,
                                                     partial(_limits_in, config, group, num_ranks)))
    return lambda num_tokens: 1 + bisect_left(
        range(1, max_ranks + 1), num_tokens, key=lambda num_ranks: num_ranks * most_of(num_ranks))


def within_memory(config: Config, group: WorkerGroup, mode: Mode, auto: bool) -> tuple[Limits, CostModel]:
    """Return what a rank of this generation holds of a pack, and its cost with this model's memory in it.

    `auto`: no more than this generation's ranks hold; a batch that no longer fits then waits for more ranks.
    """
    memory = memory_of(config, group, mode)
    limits = limits_of_generation(config, group, group.size) if auto else limits_as_given(config, group, mode)
    tokens = limits.tokens
    modes = [mode if sync == mode.sync else Mode(sync, mode.recomputes) for sync in SYNCS]
    resident = {mode.sync: sum(memory_of(config, group, mode).resident().values()) for mode in modes}
    pack_bytes = sum(memory.memory(memory.worst_load(tokens, share_of_every_pack(config))).pack.values())
    cost = replace(cost_of(config, group, mode), memory_bytes_per_token=pack_bytes / tokens, resident_bytes=resident)
    return limits, with_encoder_apart(cost, memory, tokens, limits.beyond)


def check_memory(config: Config, group: WorkerGroup, mode: Mode) -> None:
    """Refuse a model whose resident state leaves no room on a rank.

    Raises:
        RunError: what is needed, and what there is.
    """
    memory = memory_of(config, group, mode)
    needed = sum(memory.resident().values())
    if needed > MEMORY_SHARE * group.memory_bytes:
        other = "planner.sync=micro_batch, " if mode.sync == "step" else ""
        raise RunError(
            f"model of {memory.shape.num_parameters() / 1e9:.2f} B parameters: planner.sync={mode.sync} keeps "
            f"{needed / 2**30:.1f} GiB on each rank, which has {group.memory_bytes / 2**30:.1f} GiB; "
            f"use more or larger devices, {other}or a smaller model"
        )


def check_host_memory(config: Config, group: WorkerGroup, mode: Mode) -> None:
    """Refuse a run whose ranks would keep more in a node's memory than it has (`planner/memory/host.py`); on the CPU
    their state lies there too.

    Raises:
        RunError: which node, how much, what there is, and which key to change.
    """
    memory = memory_of(config, group, mode)
    alone = MemoryModel(memory.shape, replace(memory.settings, mirror_every_steps="0"))
    tokens, share = int(config.planner.tokens_per_rank), share_of_every_pack(config)
    for node_id, count in Counter(group.nodes).items():
        limit_bytes = node_limit(group, node_id)
        terms = node_terms(memory, tokens, count, share)
        if sum(terms.values()) <= limit_bytes:
            continue
        without, every = sum(node_terms(alone, tokens, count, share).values()), config.elastic.mirror_every_steps
        on_devices = sum(node_terms(memory, tokens, count).values())
        parts = ", ".join(f"{name} {_gib(value)}" for name, value in terms.items() if value)
        key, words = f"cluster.num_workers: got {config.cluster.num_workers}", "fewer ranks a node (more nodes)"
        if every != "0" and without <= limit_bytes:
            key = f"elastic.mirror_every_steps: got {every}"
            words = f"elastic.mirror_every_steps=0, which takes {_gib(without)}, or {words}"
        if share and on_devices <= limit_bytes:
            key, words = f"{OFFLOAD}: got {share}", f"a smaller share, off, which takes {_gib(on_devices)}, or {words}"
        raise RunError(f"{key}; the {count} ranks on node {node_id} keep up to {_gib(sum(terms.values()))} in its "
                       f"memory ({parts}), and may keep {_gib(limit_bytes)} ({MEMORY_SHARE:.0%} of it); "
                       f"allowed: {words}")


def saves_ahead(done: int, total: int, every: int) -> int:
    """Return the number of checkpoints that a run will write after `done` of `total` steps: one every `every` steps (0:
    none), and one at the end.
    """
    if done >= total:
        return 0
    return (total // every - done // every + (total % every > 0)) if every else 1


def check_room(
    members: Sequence[Member], config: Config, run_folder: Path | None, num_present: int, num_ahead: int
) -> None:
    """Refuse a run that could not save. `run_folder` needs room for as many checkpoints as it will hold at a time;
    without it, each node needs room for its parts of one checkpoint, before they are uploaded.

    `num_present`: the whole checkpoints that the folder already has.

    Raises:
        RunError: what is needed, what is free, and which key to change.
    """
    if not num_ahead:
        return
    whole_bytes = members[0].described["checkpoint_bytes"]
    free = [member.described["save_free_bytes"] for member in members]
    if run_folder is not None:  # one file system for all; the checkpoint under way is added to those kept
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
