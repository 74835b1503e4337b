"""The described cluster: how the ranks of any membership train (`runtime/strategy.py`), and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from dhp_ray.config import CONF
from dhp_ray.planner.cost.derived import Device
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.origin import CostFile
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.host import node_terms
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.mode import MEMORY_SHARE, Mode
from dhp_ray.planner.plan.cluster import ClusterSpec, numbered
from dhp_ray.planner.plan.types import Sample
from dhp_ray.runtime.strategy import PackLimits, Ranks, Strategy
from dhp_ray.schema import MEASURE, Config
from dhp_ray.simulate.settings import Simulation


@dataclass(frozen=True)
class Place:
    """What a membership runs on. `copy_s`: seconds that copies of the state travel, beside steps."""

    cluster: ClusterSpec
    mode: Mode
    limits: PackLimits
    cost: CostModel
    copy_s: float


class SimulatedCluster:
    """The cluster of a simulation's settings, with a model on it."""

    def __init__(self, settings: Simulation, longest_tokens: int, batch: Sequence[Sample]) -> None:
        """`longest_tokens`: of the longest sequence. `batch`: by which modes are compared. PlanError: a file is
        damaged, or state, image, longest sequence or moved activations do not fit.
        """
        cluster = settings.cluster
        self.settings = settings
        self.shape = ModelShape.load(CONF / "model_shape" / f"{settings.model}.yaml")
        self.device = Device.load(CONF / "device" / f"{cluster.device}.yaml")
        self.memory_bytes = cluster.memory_gib * 2**30
        self.place = cache(self._place)
        given = settings.train.tokens_per_rank
        strategy = Strategy(_config(settings, longest_tokens), self._ranks(self._nodes(cluster.num_ranks)),
                            given == "auto", 0, tuple(batch), CostFile.load(cluster.cost) if cluster.cost else None,
                            settings.workload.frame_pixels)
        mode = strategy.choose().mode
        if strategy.device_tokens(strategy.memory(mode)) < 1:
            needed = sum(strategy.memory(mode).resident().values())
            other = "sync=micro_batch, " if mode.sync == "step" else ""
            raise PlanError(
                f"model: {settings.model} keeps {needed / 2**30:.1f} GiB on each of {cluster.num_ranks} ranks in "
                f"{mode}, and a device has {cluster.memory_gib:g} GiB ({MEMORY_SHARE:.0%} of it is planned "
                f"with); use more or larger devices, {other}or a smaller model")
        self._strategy = _begun(strategy, mode)
        image = min(self.shape.image_tokens(settings.workload.max_pixels), longest_tokens)
        limit = self._strategy.image_limit or image
        if given == "auto" and limit < image:
            raise PlanError(
                f"workload.max_pixels: an image may have {image:,} tokens, and a rank has room for {limit:,} in "
                f"{mode}; use train.activation_checkpointing=auto (or true), a lower workload.max_pixels, or "
                "more or larger devices")
        self.first = self.place(self._nodes(cluster.num_ranks))
        most = self.first.limits.most_tokens
        if longest_tokens > most * cluster.num_ranks:
            raise PlanError(
                f"workload: the longest sequence has {longest_tokens:,} tokens, and the cluster holds at most "
                f"{most * cluster.num_ranks:,} in one ({most:,} on each of {cluster.num_ranks} ranks, in {mode}); "
                "allowed: a smaller workload.max_tokens, more ranks, "
                "train.activation_checkpointing=auto (or packs) or train.activation_offload=auto")
        self._check_node_memory()

    def _check_node_memory(self) -> None:
        """Refuse a given share of activations for which a node has no room (`auto` moves no more than it has)."""
        share, cluster = self._strategy.moved_share, self.settings.cluster
        if cluster.kind == "cpu" or not share:
            return
        terms = node_terms(self._strategy.memory(self.first.mode), self.first.limits.tokens,
                           min(cluster.ranks_per_node, cluster.num_ranks), share)
        needed, limit = sum(terms.values()), MEMORY_SHARE * cluster.node_memory_gib * 2**30
        if needed > limit:
            raise PlanError(
                f"train.activation_offload: got {self.settings.train.activation_offload}; the ranks of a node keep up "
                f"to {needed / 2**30:.1f} GiB in its memory, and may keep {limit / 2**30:.1f} GiB ({MEMORY_SHARE:.0%} "
                "of cluster.node_memory_gib); allowed: a smaller share, off or auto, or fewer ranks a node")

    def holds(self, num_ranks: int, num_tokens: int) -> bool:
        """Whether this many ranks together hold a sequence of `num_tokens` tokens."""
        return self.place(self._nodes(num_ranks)).limits.most_tokens * num_ranks >= num_tokens

    def _nodes(self, num_ranks: int) -> tuple[int, ...]:
        return tuple(rank // self.settings.cluster.ranks_per_node for rank in range(num_ranks))

    def _ranks(self, nodes: tuple[int, ...]) -> Ranks:
        cluster, names = self.settings.cluster, tuple(map(str, nodes))
        return Ranks(kind=cluster.kind, shape=self.shape, memory_bytes=int(self.memory_bytes), nodes=names,
                     node_memory_bytes=dict.fromkeys(names, cluster.node_memory_gib * 2**30),
                     device_names=(str(self.device.matches[0]),))

    def _place(self, nodes: tuple[int, ...]) -> Place:
        """The place of a membership with a rank on each of these nodes (a node once for each of its ranks)."""
        nodes = numbered(nodes)
        strategy = replace(self._strategy, ranks=self._ranks(nodes))
        mode = strategy.choose().mode
        limits, cost = strategy.plan_limits(mode)
        cluster = ClusterSpec.of_nodes(nodes, limits.tokens, offload=limits.offload, recomputation=limits.recomputation)
        rate = self.device.inter_bytes_per_s if len(set(nodes)) > 1 else self.device.intra_bytes_per_s
        trained = strategy.memory(mode).settings.num_trained(self.shape)
        copy_s = self.settings.faults.copy_s or 12 * trained / len(nodes) / rate
        return Place(cluster, mode, limits, cost, copy_s)


def _begun(strategy: Strategy, mode: Mode) -> Strategy:
    """A strategy with the limits that stay for a run which begins in this mode."""
    memory, planner = strategy.memory(mode), strategy.config.planner
    tokens = str(strategy.rank_tokens(memory)) if strategy.auto_tokens else planner.tokens_per_rank
    config = replace(strategy.config, planner=replace(planner, sync=mode.sync, tokens_per_rank=tokens))
    return replace(strategy, config=config, image_limit=memory.settings.image_limit or 0)


def _config(settings: Simulation, longest_tokens: int) -> Config:
    config, train, faults = Config(), settings.train, settings.faults
    return replace(
        config, data=replace(config.data, max_pixels=settings.workload.max_pixels),
        batch=replace(config.batch, global_samples=settings.global_samples),
        planner=replace(config.planner, sync=settings.sync, cost=MEASURE if settings.cluster.cost else "",
                        tokens_per_rank=train.tokens_per_rank, max_sequence_tokens=longest_tokens),
        train=replace(config.train, precision=train.precision, freeze=train.freeze,
                      activation_checkpointing=train.activation_checkpointing,
                      activation_offload=train.activation_offload, expert_parallel=train.expert_parallel),
        elastic=replace(config.elastic, mirror_every_steps="0" if faults.policy == "restart"
                        else faults.mirror_every_steps))
