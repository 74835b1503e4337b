"""How a run trains on its ranks: the mode, the tokens of a rank, what larger packs move or recompute, memory and costs.

    resolve     at a run's first start: the limits that stay for the run, and the mode to begin in
    Strategy    for each generation: its mode, its limits, its costs
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.config import CONF, RESOLVED, Config, ConfigError
from dhp_ray.data.families import FAMILIES
from dhp_ray.planner.cost.derived import Device, derived_cost, described, gather_s, with_encoder_apart
from dhp_ray.planner.cost.model import SYNCS, CostModel
from dhp_ray.planner.cost.origin import CostFile, Origin, difference, origin_of_run
from dhp_ray.planner.memory.host import node_terms
from dhp_ray.planner.memory.layer_share import largest_offload, largest_recomputation
from dhp_ray.planner.memory.model import MemoryModel, MemorySettings
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.mode import (
    MEMORY_SHARE,
    Mode,
    Offer,
    allowed_modes,
    choose,
    equal_samples,
    held_samples,
    reason,
    timed,
)
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, NO_RECOMPUTATION, LayerShare, Offload, Recomputation
from dhp_ray.planner.plan.types import Sample
from dhp_ray.runtime.messages import RunError
from dhp_ray.schema import MEASURE

STAND_INS = {"cuda": "a100.yaml", "npu": "ascend_910b.yaml"}
"""For each kind, the description that is used for a device that no file of conf/device describes."""

RECOMPUTATION, OFFLOAD, SHARING = (
    "train.activation_checkpointing", "train.activation_offload", "train.expert_parallel")
NO_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What ranks have: `memory_bytes` is the least of their devices, `adapters` the parameters by part. `fused`: all
    have fused norms, rotations and SwiGLU.
    """

    kind: str
    shape: ModelShape
    memory_bytes: int
    nodes: tuple[str, ...]
    node_memory_bytes: Mapping[str, float]
    device_names: tuple[str, ...]
    adapters: Mapping[str, int] = field(default_factory=dict)
    fused: bool = True

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))

    @property
    def described(self) -> bool:
        """Whether conf/device says what such devices have of memory and speed."""
        return self.kind in STAND_INS


class PackLimits(NamedTuple):
    """The tokens of a pack that a rank holds, and what packs with more of them move to host memory or recompute."""

    tokens: int
    offload: Offload
    recomputation: Recomputation = NO_RECOMPUTATION

    @property
    def most_tokens(self) -> int:
        return max(self.tokens, self.beyond.tokens_per_rank)

    @property
    def beyond(self) -> LayerShare:
        """What larger packs move or recompute."""
        return self.offload if self.offload.share else self.recomputation


class Choice(NamedTuple):
    """A mode, the keys with auto that it decides, and why. `otherwise`: `train.activation_checkpointing=auto` in
    a mode without recomputation of all packs.
    """

    mode: Mode
    keys: tuple[str, ...] = ()
    why: str = ""
    otherwise: str = "packs"

    @property
    def line(self) -> str:
        """The line that the user sees."""
        values = {"planner.sync": self.mode.sync, RECOMPUTATION: self.recomputation("auto"),
                  SHARING: self.mode.expert_parallel}
        return f"{', '.join(f'{key}=auto is {values[key]}' for key in self.keys)}: {self.why}"

    def recomputation(self, wanted: str) -> str:
        """Return what `train.activation_checkpointing` is in this mode, if the configuration says `wanted`."""
        if wanted != "auto":
            return wanted
        return self.otherwise if self.mode.recomputes == "false" else self.mode.recomputes


class ResolvedRun(NamedTuple):
    """The configuration with the limits that stay for the run, and the mode that it begins in. `auto_tokens`,
    `image_limit`: as in `Strategy`. `notices`: what to tell the user of larger images, and of packs.
    """

    config: Config
    choice: Choice
    auto_tokens: bool
    image_limit: int
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Strategy:
    """How a run with this configuration trains on these ranks.

    `auto_tokens`: tokens per rank follow the memory of the ranks. A rank must then hold its share of the longest
    sequence (while that limit is open: of the longest one of the first batch that any mode holds). Otherwise it must
    hold `planner.tokens_per_rank`. `image_limit`: the most tokens of an image in this run; 0: not known yet.
    `first_batch`: by which modes are compared; empty: equal images, or texts. `measured`: the costs of
    `planner.cost=measure`, once they are measured. `frame_pixels`: the most of a video's frame; 0: `data.max_pixels`.
    `num_ranks` in the methods: so many ranks like these; 0: as many as there are.
    """

    config: Config
    ranks: Ranks
    auto_tokens: bool = False
    image_limit: int = 0
    first_batch: Sequence[Sample] = ()
    measured: CostFile | None = None
    frame_pixels: int = 0

    @property
    def limit_bytes(self) -> float:
        """The bytes of a device that plans use."""
        return MEMORY_SHARE * self.ranks.memory_bytes

    def node_limit(self, node: str) -> float:
        """The bytes that the ranks of a node may keep in its memory."""
        return MEMORY_SHARE * self.ranks.node_memory_bytes[node]

    @property
    def moved_share(self) -> float:
        """The share of activations that each pack moves to host memory, whatever its size."""
        setting = self.config.train.activation_offload
        return 0.0 if setting in ("off", "auto") else float(setting)

    @property
    def largest_image(self) -> int:
        """The tokens of the largest image, or piece of a video, that `data.max_pixels` allows; 0 without an encoder."""
        pixels, shape = self.config.data.max_pixels, self.ranks.shape
        return FAMILIES[shape.family].largest_image_tokens(pixels, self.frame_pixels or pixels, shape.token_pixels)

    @property
    def image_tokens(self) -> int:
        """The tokens of the largest image that the keys allow, which one rank encodes."""
        return min(self.ranks.shape.image_tokens(self.config.data.max_pixels), self.longest_sequence)

    @property
    def longest_sequence(self) -> int:
        """The tokens of the longest sequence that the keys allow."""
        planner = self.config.planner
        tokens = NO_LIMIT if planner.tokens_per_rank == "auto" else int(planner.tokens_per_rank) * self.ranks.size
        return planner.max_sequence_tokens or tokens

    @property
    def largest_admitted(self) -> int:
        """The most tokens of an image that the run admits; 0: `data.max_pixels` allows no larger one."""
        return self.image_limit if self.image_limit < self.largest_image else 0

    def memory(self, mode: Mode, num_ranks: int = 0) -> MemoryModel:
        config, ranks, world_size = self.config, self.ranks, num_ranks or self.ranks.size
        device, train, given = ACCELERATORS[ranks.kind], config.train, config.planner.tokens_per_rank
        sharing = ranks.shape.ranks_that_share(mode.expert_parallel, world_size)
        memory = MemoryModel(ranks.shape, MemorySettings(
            sync=mode.sync, world_size=world_size, precision=train.precision, recomputes=mode.recomputes != "false",
            frozen=tuple(train.freeze), device=device.name, mirror_every_steps=config.elastic.mirror_every_steps,
            largest_image=self.largest_image, image_limit=self.image_limit or None,
            communicators_bytes=self._communicators_bytes(world_size, sharing),
            adapters=ranks.adapters, drops=train.lora.dropout > 0,
            expert_parallel=sharing, keeps_attention=mode.recomputes != "true"))
        if self.image_limit:
            return memory
        return memory.with_image_limit(self.limit_bytes, min(self.largest_image, self.longest_sequence),
                                       self.moved_share, 0 if given == "auto" else int(given))

    def _communicators_bytes(self, world_size: int, sharing: int) -> int:
        """Of packs: one group of all ranks, and those of the pool; of the engine: all ranks, two to share experts."""
        device, apart = ACCELERATORS[self.ranks.kind], world_size > 1
        of_packs = int(apart)
        if self.config.comm.transport == "pool":
            of_packs += min(device.pool_groups(self.ranks.memory_bytes), 2**world_size - world_size - 1)
        return device.group_bytes * of_packs + device.world_bytes * (apart + 2 * (sharing > 1))

    def device_tokens(self, memory: MemoryModel) -> int:
        """Return the tokens of a pack that each rank's device holds if packs move `moved_share`; 0: not even one."""
        return memory.tokens_that_fit(self.limit_bytes, self.moved_share)

    def rank_tokens(self, memory: MemoryModel) -> int:
        """The tokens of a pack that each rank holds, at least 1. On the CPU, packs are in the memory of the node."""
        device_tokens, share = self.device_tokens(memory), self.moved_share
        if memory.settings.device != "cpu":
            return max(1, device_tokens)

        def too_many(tokens: int) -> bool:
            pack_bytes = sum(memory.memory(memory.worst_load(tokens, share)).pack.values())
            return any(sum(node_terms(memory, tokens, count, share).values()) + count * pack_bytes
                       > self.node_limit(node) for node, count in Counter(self.ranks.nodes).items())

        return max(1, bisect_left(range(1, device_tokens + 1), True, key=too_many))

    def offload(self, memory: MemoryModel, tokens: int, most: int = NO_LIMIT) -> Offload:
        """Return what packs move to host memory, on ranks that plan with packs of `tokens`: with auto, so much that a
        larger pack fits, of at most `most` tokens, as far as there is room. (On the CPU this gains nothing.)
        """
        if self.moved_share:
            return Offload(self.moved_share, 0, tokens)
        if self.config.train.activation_offload == "off" or memory.settings.device == "cpu":
            return NO_OFFLOAD

        def has_room(held: int, share: float) -> bool:
            return all(sum(node_terms(memory, held, count, share).values()) <= self.node_limit(node)
                       for node, count in Counter(self.ranks.nodes).items())

        return largest_offload(memory, self.limit_bytes, tokens, most, has_room)

    def recomputation(
        self, memory: MemoryModel, offload: Offload, tokens: int, most: int = NO_LIMIT
    ) -> Recomputation:
        """Return what packs recompute, as `offload`: nothing if all packs are recomputed, or move activations."""
        allowed = self.config.train.activation_checkpointing in ("packs", "auto") and not memory.settings.recomputes
        if not allowed or offload.share or memory.settings.device == "cpu":
            return NO_RECOMPUTATION
        return largest_recomputation(memory, self.limit_bytes, tokens, most)

    def limits(self, mode: Mode, num_ranks: int = 0) -> PackLimits:
        """Return what each rank holds of a pack. With `auto_tokens`, at most the tokens of the run's first start or, if
        that is more, what its longest sequence needs on so many ranks. Otherwise `planner.tokens_per_rank`: tokens that
        the devices do not hold are held with activations in host memory, or recomputed, if they may be.
        """
        memory, given, most = self.memory(mode, num_ranks), int(self.config.planner.tokens_per_rank), NO_LIMIT
        if self.auto_tokens:
            longest = math.ceil(self.config.planner.max_sequence_tokens / (num_ranks or self.ranks.size))
            tokens = min(max(given, longest), self.rank_tokens(memory))
        elif self.moved_share:
            tokens = given
        else:
            tokens, most = max(1, min(given, self.device_tokens(memory))), given
        offload = self.offload(memory, tokens, most)
        found = PackLimits(tokens, offload, self.recomputation(memory, offload, tokens, most))
        return found if self.auto_tokens or found.beyond.share else found._replace(tokens=given)

    def ranks_for(self, max_ranks: int) -> Callable[[int], int]:
        """Return a function that tells how many ranks hold a sequence of a number of tokens, where tokens per rank
        follow the number of ranks; more than `max_ranks` if these do not hold it. No mode is chosen for it: one that
        holds the sequence would be.
        """
        modes = self._open_modes
        most_of = cache(lambda num_ranks: max(self.limits(mode, num_ranks).most_tokens for mode in modes))
        return lambda num_tokens: 1 + bisect_left(
            range(1, max_ranks + 1), num_tokens, key=lambda num_ranks: num_ranks * most_of(num_ranks))

    def least_ranks(self) -> int:
        """Return how many ranks like these leave room for a token beside the state, in the mode that needs least: at
        most those that the run was admitted on. (Numbers in between whose ranks share no experts count as roomy too.)
        """
        return 1 + bisect_left(range(1, self.config.cluster.num_workers), True, key=lambda num_ranks: any(
            self.memory(mode, num_ranks).fits(self.limit_bytes, 1, self.moved_share) for mode in self._open_modes))

    @property
    def _open_modes(self) -> list[Mode]:
        """The modes among which a generation chooses."""
        return self._modes() if self.ranks.described else self._modes()[:1]

    def compares_modes(self, sync: str = "") -> bool:
        """Return whether `choose` compares modes, by the first batch. `sync` replaces the configuration's value."""
        return self.ranks.described and len(self._modes(sync)) > 1

    def choose(self) -> Choice:
        planner, num_ranks, modes = self.config.planner, self.ranks.size, self._modes()
        values = zip(("planner.sync", RECOMPUTATION, SHARING), zip(*modes))
        keys = tuple(key for key, found in values if len(set(found)) > 1)
        if not keys:
            return Choice(modes[0])
        if not self.ranks.described:
            return Choice(modes[0], keys, f"what {self.ranks.kind} ranks have of memory and speed is not described",
                          "false")
        offers = [self._offer(mode) for mode in modes]
        held = num_ranks * max(1, *(offer.most_tokens for offer in offers))
        limit = min(planner.max_sequence_tokens or held, held)
        longest = max((sample.num_tokens for sample in held_samples(self.first_batch, limit)), default=1)
        follows = self.auto_tokens or planner.tokens_per_rank == "auto"
        needed = (math.ceil((planner.max_sequence_tokens or longest) / num_ranks) if follows
                  else int(planner.tokens_per_rank))
        # a given cost file is for those that it was measured for, unless others alone hold what is needed
        offers = [offer for offer in offers if self._is_given(offer.mode) and offer.holds(needed)] or offers
        least = min((offer.most_tokens for offer in offers if offer.holds(needed)), default=held)
        limit = min(limit, num_ranks * least)  # what every mode that is compared holds
        images = math.ceil(self.config.batch.global_samples / num_ranks) * num_ranks  # equally often on each rank
        shape = self.ranks.shape
        samples = held_samples(self.first_batch, limit) or equal_samples(
            images, min(self.largest_image or least, limit), shape.merge_area if shape.vision else 0)
        nodes = [rank * self.ranks.num_nodes // num_ranks for rank in range(num_ranks)]
        offers = timed(offers, needed, samples, nodes)
        return Choice(choose(offers, needed).mode, keys, reason(offers, needed, samples))

    def _modes(self, sync: str = "") -> list[Mode]:
        """Return the modes that the configuration allows, ordered by what they need, most first."""
        sync, wanted = sync or self.config.planner.sync, self.config.train.expert_parallel
        if wanted != "auto" and int(wanted) > 1 and sync != "step":
            sync, sharing = "micro_batch", [int(wanted)]
        else:
            a_node = min(Counter(self.ranks.nodes).values()) if wanted == "auto" else 1
            sharing = sorted({1, self.ranks.shape.ranks_that_share(a_node, self.ranks.size)})
        return allowed_modes(sync, self.config.train.activation_checkpointing, sharing)

    def _offer(self, mode: Mode) -> Offer:
        memory, planner, most = self.memory(mode), self.config.planner, NO_LIMIT
        derived, device = self._slowest(memory)
        cost = self.cost(mode) if self._is_given(mode) else derived
        if planner.tokens_per_rank != "auto":
            longest = math.ceil(planner.max_sequence_tokens / self.ranks.size) if self.auto_tokens else 0
            most = max(int(planner.tokens_per_rank), longest)
        tokens = min(self.device_tokens(memory), most)
        offload = self.offload(memory, max(1, tokens), most)
        return Offer(mode, tokens, cost, gather_s(memory, device, self.ranks.num_nodes), offload,
                     self.recomputation(memory, offload, max(1, tokens), most),
                     (memory.settings.image_limit or 0) >= self.image_tokens)

    def cost(self, mode: Mode) -> CostModel:
        """Return the costs of the file `planner.cost`, or those that were measured. Without them, on CUDA and NPU,
        costs are derived from the run's own model and the published figures of its slowest device; on the CPU they come
        from the measured file. A cost that was measured for something else counts as estimated.
        """
        memory, file = self.memory(mode), self._given or self.measured
        if file is None and self.ranks.described:
            cost, _ = self._slowest(memory)
        else:
            file = file or CostFile.load(CONF / "cost" / f"{self.ranks.kind}.yaml")
            cost = replace(file.cost, estimated=True) if self.difference_from(file.origin, mode) else file.cost
            copies = self.config.train.activation_offload != "off" and self.ranks.described
            if copies and cost.host_bytes_per_s == 0.0:
                cost = replace(cost, host_bytes_per_s=self._slowest(memory)[1].host_bytes_per_s)
        # the parent transport never makes a group
        return replace(cost, group_s=0.0) if self.config.comm.transport == "parent" else cost

    def plan_limits(self, mode: Mode) -> tuple[PackLimits, CostModel]:
        """Return what a rank of this generation holds of a pack, and its cost with this model's memory in it."""
        memory, limits = self.memory(mode), self.limits(mode)
        modes = (mode._replace(sync="step", expert_parallel=1), mode._replace(sync="micro_batch"))
        resident = {each.sync: sum(self.memory(each).resident().values()) for each in modes}
        pack_bytes = sum(memory.memory(memory.worst_load(limits.tokens, self.moved_share)).pack.values())
        cost = replace(self.cost(mode), memory_bytes_per_token=pack_bytes / limits.tokens, resident_bytes=resident)
        return limits, with_encoder_apart(cost, memory, limits.tokens, limits.beyond)

    @cached_property
    def _given(self) -> CostFile | None:
        """The file that `planner.cost` names."""
        named = self.config.planner.cost
        return None if named in ("", MEASURE) else CostFile.load(named)

    def _is_given(self, mode: Mode) -> bool:
        """Whether the file `planner.cost` was measured for a run in this mode, or does not say for which."""
        return self._given is not None and not self.difference_from(self._given.origin, mode)

    def difference_from(self, origin: Origin | None, mode: Mode) -> str:
        """Return how the origin of a cost differs from a run on these ranks; empty if it does not, or is not known."""
        found = (difference(origin, self.origin(mode, name)) for name in self.ranks.device_names if origin)
        return next(filter(None, found), "")

    def origin(self, mode: Mode, device_name: str = "") -> Origin:
        """Return the origin of costs that are measured here, on devices of this name (empty: that of the first)."""
        config, ranks, lora = self.config, self.ranks, self.config.train.lora
        device: dict[str, Any] = {"kind": ranks.kind, "name": device_name or ranks.device_names[0], "count": ranks.size}
        if ranks.kind == "cpu":
            device["threads"] = max(1, int(config.cluster.cpus_per_worker))
        adapters = {"rank": lora.rank, "targets": list(lora.targets), "dropout": lora.dropout} if lora.rank else {}
        return origin_of_run(self.memory(mode), model_name(config), adapters, device, ranks.fused)

    def _slowest(self, memory: MemoryModel) -> tuple[CostModel, Device]:
        """The slowest device. One that no file describes counts as another of its kind; the cost's `source` says so."""
        found = []
        for name in self.ranks.device_names:
            known = _described(name)
            device = known or Device.load(CONF / "device" / STAND_INS[self.ranks.kind])
            cost = derived_cost(memory, device, self.ranks.num_nodes, self.ranks.fused)
            found.append((cost if known else replace(cost, source=f"{cost.source}; {name} is not in conf/device"),
                          device))
        return max(found, key=lambda pair: pair[0].linear_s)

    def tokens_that_fit(self) -> int:
        """Return the tokens of a pack that a rank holds beside its state; refuse a run of which not even one fits."""
        memory = self.memory(self.choose().mode)
        if self.device_tokens(memory) < 1:
            raise self._no_room(memory)
        return self.rank_tokens(memory)

    def _no_room(self, memory: MemoryModel) -> RunError:
        needed, given = memory.memory(memory.worst_load(1)), self.config.planner.tokens_per_rank
        return RunError(
            f"planner.tokens_per_rank: got {'auto' if self.auto_tokens else given}, and a "
            f"rank has room for no token: it needs {gib(needed.device_bytes)}, {gib(sum(needed.resident.values()))} of "
            f"them for the state, and has {gib(self.limit_bytes)} ({MEMORY_SHARE:.0%} of its device); use more or "
            "larger devices, or a smaller model")

    def check_memory(self, mode: Mode) -> None:
        """Refuse a model whose resident state leaves no room on a rank."""
        memory, memory_bytes = self.memory(mode), self.ranks.memory_bytes
        needed = sum(memory.resident().values())
        if needed > self.limit_bytes:
            other = "planner.sync=micro_batch, " if mode.sync == "step" else ""
            raise RunError(
                f"model of {memory.shape.num_parameters() / 1e9:.2f} B parameters: planner.sync={mode.sync} keeps "
                f"{needed / 2**30:.1f} GiB on each rank, which has {memory_bytes / 2**30:.1f} GiB; "
                f"use more or larger devices, {other}or a smaller model")

    def check_tokens(self, mode: Mode) -> str:
        """Refuse given tokens per rank that a device does not even hold of text. Return what to tell the user if it
        does not hold as many of images; empty if it does. (On the CPU this is not modelled.)
        """
        memory, limits = self.memory(mode), self.limits(mode)
        tokens, share = limits.most_tokens, limits.beyond.of_load(limits.beyond.share)
        if not self.ranks.described or memory.fits(self.limit_bytes, tokens, **share):
            return ""

        def too_many(tokens: int) -> bool:
            text = memory.worst_load(tokens, **share)._replace(vision_tokens=0, patches=0)
            return memory.memory(text).device_bytes > self.limit_bytes

        text = bisect_left(range(1, tokens + 1), True, key=too_many)
        if not text:
            raise self._no_room(memory)
        images = f", {memory.tokens_that_fit(self.limit_bytes, **share):,} of images" if memory.shape.vision else ""
        holds = f"planner.tokens_per_rank: got {tokens}; in {mode} a device holds {text:,} tokens of text{images}"
        if text == tokens:
            return f"{holds}: a pack with more of these may run out of its memory"
        raise RunError(f"{holds}; allowed: auto, at most {text}, more or larger devices, or {RECOMPUTATION}=auto")

    def check_host_memory(self, mode: Mode) -> None:
        """Refuse ranks that would keep more in a node's memory than it has (`planner/memory/host.py`)."""
        config, memory = self.config, self.memory(mode)
        alone = MemoryModel(memory.shape, replace(memory.settings, mirror_every_steps="0"))
        tokens, share, every = self.limits(mode).most_tokens, self.moved_share, config.elastic.mirror_every_steps
        for node, count in Counter(self.ranks.nodes).items():
            limit_bytes = self.node_limit(node)
            terms = node_terms(memory, tokens, count, share)
            if sum(terms.values()) <= limit_bytes:
                continue
            without = sum(node_terms(alone, tokens, count, share).values())
            on_devices = sum(node_terms(memory, tokens, count).values())
            parts = ", ".join(f"{name} {gib(value)}" for name, value in terms.items() if value)
            key, words = f"cluster.num_workers: got {config.cluster.num_workers}", "fewer ranks a node (more nodes)"
            if every != "0" and without <= limit_bytes:
                key = f"elastic.mirror_every_steps: got {every}"
                words = f"elastic.mirror_every_steps=0, which takes {gib(without)}, or {words}"
            if share and on_devices <= limit_bytes:
                key = f"{OFFLOAD}: got {share}"
                words = f"a smaller share, off, which takes {gib(on_devices)}, or {words}"
            raise RunError(f"{key}; the {count} ranks on node {node} keep up to {gib(sum(terms.values()))} in its "
                           f"memory ({parts}), and may keep {gib(limit_bytes)} ({MEMORY_SHARE:.0%} of it); "
                           f"allowed: {words}")

    def check_cost(self, mode: Mode) -> None:
        """Refuse a cost file that was not measured for the run's model, devices and settings."""
        if self._given and (other := self.difference_from(self._given.origin, mode)):
            raise ConfigError(f"planner.cost: {self.config.planner.cost} was {other}; allowed: a file that "
                              f"jobs/measure.py wrote for such a run, {MEASURE}, or nothing")


def resolve(
    config: Config, ranks: Ranks, stored: Mapping[str, Any], first_batch: Sequence[Sample] = (),
    takes_over: bool = False, frame_pixels: int = 0,
) -> ResolvedRun:
    """Fix the run's limits and how its ranks synchronise at its first start; later starts read them back from the run
    folder (`stored`: its configuration by dotted key). `takes_over`: the ranks are those left of a run that goes on.
    RunError: the model does not fit, or auto finds no value. ConfigError: the cost file is of another run.
    """
    def resolved(**values: Any) -> Strategy:
        return replace(run, config=replace(run.config, planner=replace(run.config.planner, **values)))

    given, recorded = config.planner, recorded_sync(config, stored)
    if recorded == "step" and config.train.expert_parallel not in ("auto", "1"):
        raise ConfigError(f"{SHARING}: got {config.train.expert_parallel}, and the run began with planner.sync=step, "
                          "where each rank has all experts; allowed: 1, or planner.sync=micro_batch")
    image_limit = int(stored.get(f"{RESOLVED}.image_limit") or 0)
    run = Strategy(config, ranks, given.tokens_per_rank == "auto", image_limit, first_batch, frame_pixels=frame_pixels)
    largest = run.image_tokens
    run = resolved(
        max_sequence_tokens=given.max_sequence_tokens or int(stored.get("planner.max_sequence_tokens") or 0),
        sync=recorded or given.sync)
    if run.auto_tokens:
        run = resolved(tokens_per_rank=str(stored.get("planner.tokens_per_rank") or "auto"))
    choice = run.choose()
    if recorded:
        choice = choice._replace(keys=("planner.sync", *choice.keys), why="; ".join(
            ["planner.sync as at the run's first start", *filter(None, [choice.why])]))
    run = resolved(sync=choice.mode.sync)
    run = replace(run, image_limit=run.memory(choice.mode).settings.image_limit or 0)
    if not takes_over:
        run.check_memory(choice.mode)
    if run.config.planner.tokens_per_rank == "auto":
        run = resolved(tokens_per_rank=str(run.tokens_that_fit()))
    if not run.config.planner.max_sequence_tokens:
        limits = run.limits(run.choose().mode if run.auto_tokens else choice.mode)
        run = resolved(max_sequence_tokens=limits.most_tokens * ranks.size)
    notices = [skipped_images(run.largest_admitted, largest)]
    if not takes_over:
        notices.append(run.check_tokens(choice.mode))
        run.check_host_memory(choice.mode)
        run.check_cost(choice.mode)
    return ResolvedRun(run.config, choice, run.auto_tokens, run.image_limit, tuple(filter(None, notices)))


def recorded_sync(config: Config, stored: Mapping[str, Any]) -> str:
    """What `planner.sync=auto` resolved to at the run's first start; empty if sync is not auto, or this is it."""
    found = stored.get("planner.sync")
    return str(found) if config.planner.sync == "auto" and found in SYNCS else ""


def skipped_images(limit: int, largest: int) -> str:
    """What to tell the user if the run admits images of `limit` tokens (0: any), and the keys `largest`; else empty."""
    return (f"images of more than {limit:,} of {largest:,} tokens will be skipped: a rank has no room for larger "
            "ones; train.activation_checkpointing=true may make room, or lower data.max_pixels"
            if 0 < limit < largest else "")


def model_name(config: Config) -> str:
    return config.model.preset or Path(config.model.path).resolve().name


@cache
def _described(device_name: str) -> Device | None:
    return described(CONF / "device", device_name)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
