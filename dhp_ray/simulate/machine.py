"""The described cluster: for any membership, its ranks, their mode, tokens and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from dhp_ray.comm.device import ACCELERATORS
from dhp_ray.config import CONF
from dhp_ray.planner.cost.derived import Device
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.host import node_terms
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.mode import MEMORY_SHARE
from dhp_ray.planner.plan.cluster import ClusterSpec, numbered
from dhp_ray.planner.plan.types import Sample
from dhp_ray.simulate.settings import Simulation
from dhp_ray.simulate.training import Ranks, Training, Wanted, training_of


@dataclass(frozen=True)
class Place:
    """What a membership runs on. `copy_s`: seconds that copies of the state travel, beside steps."""

    cluster: ClusterSpec
    training: Training
    copy_s: float


class Machine:
    """The cluster of a simulation's settings, with a model on it."""

    def __init__(self, settings: Simulation, longest_tokens: int, batch: Sequence[Sample]) -> None:
        """`longest_tokens`: of the longest sequence. `batch`: the first batch, for which modes are compared.

        Raises:
            PlanError: a file is damaged, the state or an image does not fit on a device, the longest sequence does not
                fit on all, or a node has no room for the activations that are moved there.
        """
        cluster = settings.cluster
        self.settings = settings
        self.shape = ModelShape.load(CONF / "model_shape" / f"{settings.model}.yaml")
        self.device = Device.load(CONF / "device" / f"{cluster.device}.yaml")
        self.memory_bytes = cluster.memory_gib * 2**30
        self.pool_groups = ACCELERATORS[cluster.kind].pool_groups("auto", int(self.memory_bytes))
        self._cost = CostModel.load(cluster.cost) if cluster.cost else None
        self._longest_tokens, self._batch = longest_tokens, tuple(batch)
        self._made = cache(self._place)
        first = self._training(self._nodes(cluster.num_ranks))
        if first.tokens_per_rank < 1:
            needed = sum(first.memory.resident().values())
            raise PlanError(
                f"model: {settings.model} keeps {needed / 2**30:.1f} GiB on each of {cluster.num_ranks} ranks in "
                f"{first.mode}, and a device has {cluster.memory_gib:g} GiB ({MEMORY_SHARE:.0%} of it is planned "
                "with); use more or larger devices, sync=micro_batch or a smaller model")
        image = min(settings.workload.max_pixels // self.shape.token_pixels, longest_tokens)
        limit = first.memory.settings.image_limit or image
        if settings.train.tokens_per_rank == "auto" and limit < image:
            raise PlanError(
                f"workload.max_pixels: an image may have {image:,} tokens, and a rank has room for {limit:,} in "
                f"{first.mode}; use train.activation_checkpointing=auto (or true), a lower workload.max_pixels, or "
                "more or larger devices")
        if longest_tokens > first.most_tokens * cluster.num_ranks:
            raise PlanError(
                f"workload: the longest sequence has {longest_tokens:,} tokens, and the cluster holds at most "
                f"{first.most_tokens * cluster.num_ranks:,} in one ({first.most_tokens:,} on each of "
                f"{cluster.num_ranks} ranks, in {first.mode}); allowed: a smaller workload.max_tokens, more ranks, "
                "train.activation_checkpointing=auto (or packs) or train.activation_offload=auto")
        self.first = first
        self._check_node_memory()

    def _check_node_memory(self) -> None:
        """Refuse a given share of activations for which a node has no room (`auto` moves no more than it has)."""
        share, cluster = self.first.offload.share, self.settings.cluster
        if cluster.kind == "cpu" or self.settings.train.activation_offload in ("off", "auto"):
            return
        terms = node_terms(self.first.memory, self.first.tokens_per_rank,
                           min(cluster.ranks_per_node, cluster.num_ranks), share)
        needed, limit = sum(terms.values()), MEMORY_SHARE * cluster.node_memory_gib * 2**30
        if needed > limit:
            raise PlanError(
                f"train.activation_offload: got {self.settings.train.activation_offload}; the ranks of a node keep up "
                f"to {needed / 2**30:.1f} GiB in its memory, and may keep {limit / 2**30:.1f} GiB ({MEMORY_SHARE:.0%} "
                "of cluster.node_memory_gib); allowed: a smaller share, off or auto, or fewer ranks a node")

    @property
    def sync(self) -> str:
        return self.first.mode.sync

    def place(self, nodes: tuple[int, ...]) -> Place:
        """The place of a membership with a rank on each of these nodes (a node once for each of its ranks)."""
        return self._made(numbered(nodes))

    def holds(self, num_ranks: int, num_tokens: int) -> bool:
        """Whether this many ranks together hold a sequence of `num_tokens` tokens."""
        place = self.place(self._nodes(num_ranks))
        return place.training.most_tokens * num_ranks >= num_tokens

    def _nodes(self, num_ranks: int) -> tuple[int, ...]:
        return tuple(rank // self.settings.cluster.ranks_per_node for rank in range(num_ranks))

    def _training(
        self, nodes: tuple[int, ...], tokens_per_rank: str = "", sync: str = "", image_limit: int = 0
    ) -> Training:
        settings = self.settings
        wanted = Wanted(
            sync=sync or settings.sync, recomputes=settings.train.activation_checkpointing,
            precision=settings.train.precision, frozen=tuple(settings.train.freeze),
            tokens_per_rank=tokens_per_rank or settings.train.tokens_per_rank, image_limit=image_limit,
            activation_offload=settings.train.activation_offload,
            mirror_every_steps="0" if settings.faults.policy == "restart" else settings.faults.mirror_every_steps,
            longest_tokens=self._longest_tokens, batch=self._batch, max_pixels=settings.workload.max_pixels,
            frame_pixels=settings.workload.frame_pixels,
            samples_per_rank=math.ceil(settings.global_samples / len(nodes)))
        ranks = Ranks(device=self.device, kind=settings.cluster.kind, memory_bytes=self.memory_bytes, nodes=nodes,
                      node_memory_bytes=settings.cluster.node_memory_gib * 2**30)
        return training_of(self.shape, ranks, wanted, self._cost)

    def _place(self, nodes: tuple[int, ...]) -> Place:
        settings = self.settings
        if len(nodes) == settings.cluster.num_ranks:
            training = self.first
        else:  # at most as many as at the start, or as the longest sequence needs on fewer ranks
            most = max(self.first.most_tokens, math.ceil(self._longest_tokens / len(nodes)))
            limit = self.first.memory.settings.image_limit or 0
            given = settings.train.tokens_per_rank
            training = self._training(nodes, str(most) if given == "auto" else given, self.sync, limit)
            training = replace(training, tokens_per_rank=max(1, training.tokens_per_rank))
        cluster = ClusterSpec.of_nodes(nodes, training.tokens_per_rank, offload=training.offload,
                                       recomputation=training.recomputation)
        rate = self.device.inter_bytes_per_s if len(set(nodes)) > 1 else self.device.intra_bytes_per_s
        trained = training.memory.settings.num_trained(self.shape)
        copy_s = settings.faults.copy_s or 12 * trained / len(nodes) / rate
        return Place(cluster, training, copy_s)
