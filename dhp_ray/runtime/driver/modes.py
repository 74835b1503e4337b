"""How a generation trains, what its ranks then need, and what that costs: the memory model and the costs of the run's
own model on its devices, and the choice of a mode where `planner.sync` or `train.activation_checkpointing` is auto.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.config import CONF, Config, ConfigError
from dhp_ray.planner.cost.derived import Device, derived_cost, described, gather_s
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.origin import CostFile, Origin, difference
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.mode import (
    MEMORY_SHARE,
    Mode,
    Offer,
    allowed_modes,
    candidates_of,
    choose,
    equal_samples,
    held_samples,
    reason,
)
from dhp_ray.planner.plan.types import Sample
from dhp_ray.runtime.driver.group import WorkerGroup
from dhp_ray.runtime.driver.host_room import (
    Limits,
    offload_of,
    plain_tokens,
    recomputation_of,
    share_of_every_pack,
)
from dhp_ray.runtime.driver.image_limits import image_tokens_of, largest_image_of, longest_of
from dhp_ray.runtime.origins import origin_of
from dhp_ray.schema import MEASURE

STAND_INS = {"cuda": "a100.yaml", "npu": "ascend_910b.yaml"}
"""For each kind, the description that is used for a device that no file of conf/device describes."""

RECOMPUTATION = "train.activation_checkpointing"


class Choice(NamedTuple):
    """A mode, the keys that are auto in the configuration and that it decides, and why it was chosen. `otherwise`: the
    value of `train.activation_checkpointing` in a mode without recomputation of all packs.
    """

    mode: Mode
    keys: tuple[str, ...] = ()
    why: str = ""
    otherwise: str = "packs"

    @property
    def line(self) -> str:
        """The line that the user sees."""
        values = {"planner.sync": self.mode.sync, RECOMPUTATION: self.recomputation("auto")}
        return f"{', '.join(f'{key}=auto is {values[key]}' for key in self.keys)}: {self.why}"

    def recomputation(self, wanted: str) -> str:
        """Return what `train.activation_checkpointing` is in this mode, if the configuration says `wanted`."""
        return wanted if wanted != "auto" else "true" if self.mode.recomputes else self.otherwise


def mode_of(config: Config, group: WorkerGroup, auto_tokens: bool, num_ranks: int = 0) -> Choice:
    """Return the mode in which `num_ranks` ranks like those of `group` train (0: as many as the group has).

    `auto_tokens`: the tokens per rank follow the memory of each generation's ranks. A rank must then hold its share of
    the longest sequence (while that limit is open: of the longest one of the first batch that any mode holds).
    Otherwise it must hold `planner.tokens_per_rank`.
    """
    kind, num_ranks = group.members[0].described["device"], num_ranks or group.size
    modes = _modes(config)
    values = zip(("planner.sync", RECOMPUTATION), zip(*modes))
    keys = tuple(key for key, found in values if len(set(found)) > 1)
    if not keys:
        return Choice(modes[0])
    if kind not in STAND_INS:
        return Choice(modes[0], keys, f"what {kind} ranks have of memory and speed is not described", "false")
    most = _most_tokens(config, auto_tokens, num_ranks)
    memories = [memory_of(config, group, mode, num_ranks) for mode in modes]
    offers = [_offer(config, group, mode, memory, most) for mode, memory in zip(modes, memories)]
    held = num_ranks * max(1, *(offer.most_tokens for offer in offers))
    limit = min(config.planner.max_sequence_tokens or held, held)
    longest = max((sample.num_tokens for sample in held_samples(group.first_batch, limit)), default=1)
    needed = _needed_tokens(config, auto_tokens, num_ranks, longest)
    least = min((offer.most_tokens for offer in offers if offer.holds(needed)), default=held)
    limit = min(limit, num_ranks * least)  # what every mode that is compared holds
    samples = held_samples(group.first_batch, limit) or _images(config, memories[0], num_ranks, limit)
    num_nodes = len(set(group.nodes))
    candidates = candidates_of(offers, needed, samples, [rank * num_nodes // num_ranks for rank in range(num_ranks)])
    return Choice(choose(candidates, needed).mode, keys, reason(candidates, needed, samples))


def most_tokens_of(config: Config, group: WorkerGroup, num_ranks: int, limits: Callable[[Mode], Limits]) -> int:
    """Return the tokens of a pack that each of `num_ranks` ranks holds in the mode that they would train in; `limits`
    returns those of each mode.

    This does not compare modes: if some mode holds the longest sequence, one that does is chosen; otherwise the one
    that holds the most tokens.
    """
    kind = group.members[0].described["device"]
    modes = _modes(config)
    return max(limits(mode).most_tokens for mode in (modes if kind in STAND_INS else modes[:1]))


def compares_modes(config: Config, group: WorkerGroup, sync: str = "") -> bool:
    """Return whether `mode_of` compares modes, using `group.first_batch` if there is one. `sync` replaces the
    configuration's value.
    """
    kind = group.members[0].described["device"]
    return kind in STAND_INS and len(_modes(config, sync)) > 1


def _modes(config: Config, sync: str = "") -> list[Mode]:
    """Return the modes that the configuration allows, ordered by what they need, most first."""
    return allowed_modes(sync or config.planner.sync, config.train.activation_checkpointing)


def _most_tokens(config: Config, auto_tokens: bool, num_ranks: int) -> int | None:
    """Return the most tokens that a rank is given; None: as many as it holds."""
    tokens = config.planner.tokens_per_rank
    if tokens == "auto":
        return None
    return max(int(tokens), math.ceil(config.planner.max_sequence_tokens / num_ranks)) if auto_tokens else int(tokens)


def _needed_tokens(config: Config, auto_tokens: bool, num_ranks: int, longest: int) -> int:
    """Return the tokens that a rank must hold: `planner.tokens_per_rank`, or its share of the longest sequence (while
    that limit is open: of `longest` tokens).
    """
    tokens, limit = config.planner.tokens_per_rank, config.planner.max_sequence_tokens
    if not (auto_tokens or tokens == "auto"):
        return int(tokens)
    return math.ceil((limit or longest) / num_ranks)


def _offer(config: Config, group: WorkerGroup, mode: Mode, memory: MemoryModel, most_tokens: int | None) -> Offer:
    fitting, (cost, device) = plain_tokens(config, memory, group), _slowest(memory, group)
    tokens, most = fitting if most_tokens is None else min(fitting, most_tokens), most_tokens or 2**62
    offload = offload_of(config, memory, group, max(1, tokens), most)
    return Offer(mode, tokens, cost, gather_s(memory, device, len(set(group.nodes))), offload,
                 recomputation_of(config, memory, group, offload, max(1, tokens), most),
                 (memory.settings.image_limit or 0) >= image_tokens_of(config, group))


def _images(config: Config, memory: MemoryModel, num_ranks: int, longest: int) -> list[Sample]:
    """Return what stands in for a batch: the largest image, equally often on each rank."""
    count = math.ceil(config.batch.global_samples / num_ranks) * num_ranks
    return equal_samples(count, min(memory.settings.largest_image, longest), memory.shape.merge_area)


def memory_of(config: Config, group: WorkerGroup, mode: Mode, num_ranks: int = 0) -> MemoryModel:
    """Return the memory model of a rank that trains the run's model in this mode, one of `num_ranks` like those of
    `group` (0: as many as the group has).
    """
    described, train = group.members[0].described, config.train
    shape: ModelShape = described["shape"]
    device = ACCELERATORS[described["device"]]
    pooled = device.pool_groups(config.comm.pool_groups, group.memory_bytes) if config.comm.transport == "pool" else 0
    world_size = num_ranks or group.size
    num_groups = min(pooled, 2**world_size - world_size - 1)  # sets of two ranks and more
    memory = MemoryModel(shape, MemorySettings(
        sync=mode.sync, world_size=world_size, precision=train.precision, recomputes=mode.recomputes,
        frozen=tuple(train.freeze), device=device.name, mirror_every_steps=config.elastic.mirror_every_steps,
        largest_image=largest_image_of(config, shape), image_limit=group.image_limit or None,
        communicators_bytes=num_groups * device.group_bytes, adapters=described.get("adapters", {}),
        drops=train.lora.dropout > 0))
    if group.image_limit:
        return memory
    given = config.planner.tokens_per_rank
    largest = min(memory.settings.largest_image, longest_of(config, group))
    return memory.with_image_limit(MEMORY_SHARE * group.memory_bytes, largest, share_of_every_pack(config),
                                   0 if given == "auto" else int(given))


def cost_of(config: Config, group: WorkerGroup, mode: Mode) -> CostModel:
    """Return the costs of the file `planner.cost`, or those measured on the group. Without them, on CUDA and NPU, costs
    are derived from the run's own model and the published figures of its slowest device; on the CPU they come from the
    measured file.

    A device without a description is treated as another one of its kind; the cost's `source` says so. A cost that was
    measured for something else counts as estimated.
    """
    memory = memory_of(config, group, mode)
    file = cost_file_of(config, group)
    if file is None:
        cost, _ = _slowest(memory, group)
    else:
        other = file.origin is not None and difference_from(file.origin, config, group, memory)
        cost = replace(file.cost, estimated=True) if other else file.cost
        kind = group.members[0].described["device"]
        if config.train.activation_offload != "off" and kind in STAND_INS and cost.host_bytes_per_s == 0.0:
            cost = replace(cost, host_bytes_per_s=_slowest(memory, group)[1].host_bytes_per_s)
    # the parent transport never makes a group
    return replace(cost, group_s=0.0) if config.comm.transport == "parent" else cost


def cost_file_of(config: Config, group: WorkerGroup) -> CostFile | None:
    """Return what a run's costs are read from; None: they are derived."""
    kind, named = group.members[0].described["device"], config.planner.cost
    if named == MEASURE:
        if group.measured_cost:
            return group.measured_cost
        named = ""  # not measured yet
    if named or kind not in STAND_INS:
        return CostFile.load(named or str(CONF / "cost" / f"{kind}.yaml"))
    return None


def difference_from(origin: Origin, config: Config, group: WorkerGroup, memory: MemoryModel) -> str:
    """Return how the origin of a cost differs from a run on these workers; empty if it does not."""
    kinds = {(member.described["device"], member.described["device_name"]) for member in group.members}
    found = (difference(origin, origin_of(config, memory, *kind, group.size, has_fused_operators(group)))
             for kind in sorted(kinds))
    return next(filter(None, found), "")


def check_cost(config: Config, group: WorkerGroup, mode: Mode) -> None:
    """Refuse a cost file that was not measured for the run's model, devices and settings.

    Raises:
        ConfigError: what the file was measured for, and what the run has.
    """
    named = config.planner.cost
    origin = CostFile.load(named).origin if named not in ("", MEASURE) else None
    other = difference_from(origin, config, group, memory_of(config, group, mode)) if origin else ""
    if other:
        raise ConfigError(f"planner.cost: {named} was {other}; allowed: a file that jobs/measure.py wrote for such a "
                          f"run, {MEASURE}, or nothing")


def has_fused_operators(group: WorkerGroup) -> bool:
    """Return whether all ranks train with fused norms, rotations and SwiGLU."""
    return all(member.described["fused"] for member in group.members)


def _slowest(memory: MemoryModel, group: WorkerGroup) -> tuple[CostModel, Device]:
    """Return the costs on the slowest device of a group, and that device."""
    kind, num_nodes = group.members[0].described["device"], len(set(group.nodes))
    found = []
    for name in sorted({member.described["device_name"] for member in group.members}):
        known = _described(name)
        device = known or Device.load(CONF / "device" / STAND_INS[kind])
        cost = derived_cost(memory, device, num_nodes, has_fused_operators(group))
        found.append((cost if known else replace(cost, source=f"{cost.source}; {name} is not in conf/device"), device))
    return max(found, key=lambda pair: pair[0].linear_s)


@cache
def _described(device_name: str) -> Device | None:
    return described(CONF / "device", device_name)
