"""How the ranks of a described cluster train a model: the mode, tokens per rank, costs and memory that a run there
would plan with (`runtime/strategy.py`, from settings instead of workers), with fused operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.data.families import FAMILIES
from dhp_ray.planner.cost.derived import Device, derived_cost, gather_s, with_encoder_apart, with_offload_bytes
from dhp_ray.planner.cost.model import SYNCS, CostModel
from dhp_ray.planner.memory.host import node_terms
from dhp_ray.planner.memory.layer_share import largest_offload, largest_recomputation
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
)
from dhp_ray.planner.plan.cluster import NO_OFFLOAD, NO_RECOMPUTATION, LayerShare, Offload, Recomputation, sizes_of
from dhp_ray.planner.plan.types import Sample
from dhp_ray.schema import Data


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of a cluster, one for each device: the device, its memory and that of a node, and the node of each
    rank.
    """

    device: Device
    kind: str
    memory_bytes: float
    nodes: tuple[int, ...]
    node_memory_bytes: float = 0.0

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run's configuration asks for; `auto` leaves a choice open (`train.*`, `planner.sync`)."""

    sync: str = "step"
    recomputes: str = "auto"
    precision: str = "bf16"
    frozen: tuple[str, ...] = ()
    tokens_per_rank: str = "auto"
    image_limit: int = 0
    """The most tokens of an image; 0: what follows from `tokens_per_rank`."""
    activation_offload: str = "off"
    mirror_every_steps: str = "0"
    longest_tokens: int = 1
    """The longest sequence, which all ranks together must hold."""
    batch: tuple[Sample, ...] = ()
    """The batch for which modes are compared; empty: `samples_per_rank` images a rank."""
    samples_per_rank: int = 1
    max_pixels: int = Data().max_pixels
    frame_pixels: int = Data().max_pixels
    """The most pixels of an image, and of a frame of a video."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """`tokens_per_rank`: the most of a pack, except for packs that `beyond` admits. `gather_s`: seconds that the
    parameters and gradients of a pack's layers travel, beside its compute. `step_s`: of the batch for which modes were
    compared; infinite if there was only one mode.
    """

    mode: Mode
    tokens_per_rank: int
    memory: MemoryModel
    cost: CostModel
    gather_s: float
    offload: Offload = NO_OFFLOAD
    recomputation: Recomputation = NO_RECOMPUTATION
    step_s: float = math.inf

    @property
    def most_tokens(self) -> int:
        """The most tokens of a pack on a rank."""
        return max(self.tokens_per_rank, self.beyond.tokens_per_rank)

    @property
    def beyond(self) -> LayerShare:
        """What packs of more than `tokens_per_rank` move or recompute."""
        return self.offload if self.offload.share else self.recomputation


def training_of(shape: ModelShape, ranks: Ranks, wanted: Wanted, cost: CostModel | None = None) -> Training:
    """The mode that follows from `wanted` and the memory of the ranks, with everything that depends on it.

    `cost`: a measured cost, used instead of the derived one. `tokens_per_rank` is below 1 if the state alone does not
    fit in any of the modes.
    """
    found = [_training(shape, ranks, wanted, mode, cost) for mode in allowed_modes(wanted.sync, wanted.recomputes)]
    best = found[0]
    if len(found) > 1:
        num_ranks = len(ranks.nodes)
        image = wanted.max_pixels // shape.token_pixels if shape.vision else 0
        image = min(image, wanted.image_limit or image)
        needed = math.ceil(wanted.longest_tokens / num_ranks)
        held = num_ranks * max(1, *(one.most_tokens for one in found))
        limit = min(wanted.longest_tokens, held)
        samples = held_samples(wanted.batch, limit) or equal_samples(
            wanted.samples_per_rank * num_ranks, min(_largest_image(shape, wanted), limit), shape.merge_area)
        offers = [Offer(one.mode, one.tokens_per_rank, one.cost, one.gather_s, one.offload, one.recomputation,
                        (one.memory.settings.image_limit or 0) >= image) for one in found]
        candidates = candidates_of(offers, needed, samples, ranks.nodes)
        chosen = choose(candidates, needed)
        best = replace(found[candidates.index(chosen)], step_s=chosen.step_s)
    return replace(best, cost=_with_memory(shape, ranks, wanted, best))


def memory_of(shape: ModelShape, ranks: Ranks, wanted: Wanted, mode: Mode) -> MemoryModel:
    """The memory that each of these ranks needs in a mode."""
    accelerator, world_size = ACCELERATORS[ranks.kind], len(ranks.nodes)
    groups = min(accelerator.pool_groups("auto", int(ranks.memory_bytes)), 2**min(world_size, 60) - world_size - 1)
    limit = wanted.image_limit or (None if wanted.tokens_per_rank == "auto" else int(wanted.tokens_per_rank))
    memory = MemoryModel(shape, MemorySettings(
        sync=mode.sync, world_size=world_size, precision=wanted.precision, recomputes=mode.recomputes,
        frozen=wanted.frozen, device=ranks.kind, largest_image=_largest_image(shape, wanted),
        image_limit=limit, mirror_every_steps=wanted.mirror_every_steps,
        communicators_bytes=groups * accelerator.group_bytes))
    if limit or not shape.vision:
        return memory
    return memory.with_image_limit(
        MEMORY_SHARE * ranks.memory_bytes, memory.settings.largest_image, _share_of_every_pack(wanted))


def _largest_image(shape: ModelShape, wanted: Wanted) -> int:
    if not shape.vision:
        return 0
    return FAMILIES[shape.family].largest_image_tokens(wanted.max_pixels, wanted.frame_pixels, shape.token_pixels)


def _training(shape: ModelShape, ranks: Ranks, wanted: Wanted, mode: Mode, measured: CostModel | None) -> Training:
    memory = memory_of(shape, ranks, wanted, mode)
    most = 2**62 if wanted.tokens_per_rank == "auto" else int(wanted.tokens_per_rank)
    tokens = min(memory.tokens_that_fit(MEMORY_SHARE * ranks.memory_bytes, _share_of_every_pack(wanted)), most)
    offload = _offload(memory, ranks, wanted, tokens, most)
    cost = measured.in_mode(mode.sync) if measured else derived_cost(memory, ranks.device, ranks.num_nodes)
    if ranks.kind != "cpu" and cost.host_bytes_per_s == 0.0:  # no cost file has what copies take
        cost = replace(with_offload_bytes(cost, memory), host_bytes_per_s=ranks.device.host_bytes_per_s)
    return Training(mode=mode, tokens_per_rank=tokens, memory=memory, cost=cost,
                    gather_s=gather_s(memory, ranks.device, ranks.num_nodes), offload=offload,
                    recomputation=_recomputation(memory, ranks, wanted, offload, tokens, most))


def _share_of_every_pack(wanted: Wanted) -> float:
    return 0.0 if wanted.activation_offload in ("off", "auto") else float(wanted.activation_offload)


def _offload(memory: MemoryModel, ranks: Ranks, wanted: Wanted, tokens: int, most: int) -> Offload:
    """What packs move to host memory if the ranks plan with packs of `tokens`."""
    if tokens < 1 or wanted.activation_offload == "off":
        return NO_OFFLOAD
    if share := _share_of_every_pack(wanted):
        return Offload(share, 0, tokens)
    if ranks.kind == "cpu":
        return NO_OFFLOAD

    def has_room(held: int, share: float) -> bool:
        terms = node_terms(memory, held, max(sizes_of(ranks.nodes)), share)
        return sum(terms.values()) <= MEMORY_SHARE * ranks.node_memory_bytes

    return largest_offload(memory, MEMORY_SHARE * ranks.memory_bytes, tokens, most, has_room)


def _recomputation(
    memory: MemoryModel, ranks: Ranks, wanted: Wanted, offload: Offload, tokens: int, most: int
) -> Recomputation:
    """What packs recompute if the ranks plan with packs of `tokens`."""
    allowed = wanted.recomputes in ("packs", "auto") and not memory.settings.recomputes
    if tokens < 1 or not allowed or offload.share or ranks.kind == "cpu":
        return NO_RECOMPUTATION
    return largest_recomputation(memory, MEMORY_SHARE * ranks.memory_bytes, tokens, most)


def _with_memory(shape: ModelShape, ranks: Ranks, wanted: Wanted, training: Training) -> CostModel:
    """The cost with the bytes of this model's packs, and of its state in both modes."""
    memory, tokens = training.memory, max(1, training.tokens_per_rank)
    modes = [training.mode if sync == training.mode.sync else Mode(sync, training.mode.recomputes) for sync in SYNCS]
    resident = {mode.sync: sum(memory_of(shape, ranks, wanted, mode).resident().values()) for mode in modes}
    load = memory.worst_load(tokens, _share_of_every_pack(wanted))
    pack_bytes = sum(memory.memory(load).pack.values())
    cost = replace(training.cost, memory_bytes_per_token=pack_bytes / tokens, resident_bytes=resident)
    return with_encoder_apart(cost, memory, tokens, training.beyond)


def fixed_nodes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The node of each rank, given the number of ranks of each node."""
    return tuple(node for node, size in enumerate(sizes) for _ in range(size))
