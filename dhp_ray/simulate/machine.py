"""The described cluster: how the ranks of any membership train (`runtime/strategy.py`), and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from dhp_ray.config import CONF
from dhp_ray.planner.cost.derived import Device, described
from dhp_ray.planner.cost.model import CostModel
from dhp_ray.planner.cost.origin import CostFile, Origin
from dhp_ray.planner.errors import PlanError
from dhp_ray.planner.memory.model_shape import ModelShape
from dhp_ray.planner.mode import Mode
from dhp_ray.planner.plan.cluster import ClusterSpec, numbered
from dhp_ray.planner.plan.types import Sample
from dhp_ray.runtime.messages import RunError
from dhp_ray.runtime.strategy import PackLimits, Ranks, Strategy, resolve
from dhp_ray.schema import MEASURE, Config, ConfigError
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
        damaged, or of other devices or another model, or what the ranks hold does not fit.
        """
        cluster = settings.cluster
        self.settings = settings
        self.shape = ModelShape.load(CONF / "model_shape" / f"{settings.model}.yaml")
        self.device = Device.load(CONF / "device" / f"{cluster.device}.yaml")
        self.memory_bytes = cluster.memory_gib * 2**30
        self.place = cache(self._place)
        nodes, frame_pixels = self._nodes(cluster.num_ranks), settings.workload.frame_pixels
        origin = CostFile.load(cluster.cost).origin if cluster.cost else None
        self._devices = self._as_measured(origin)
        config, ranks = _config(settings, longest_tokens, origin), self._ranks(nodes)
        try:
            run = resolve(config, ranks, {}, tuple(batch), frame_pixels=frame_pixels)
        except (RunError, ConfigError) as error:
            raise PlanError(_renamed(str(error))) from None
        mode = run.choice.mode
        self._strategy = Strategy(run.config, ranks, run.auto_tokens, run.image_limit, tuple(batch),
                                  frame_pixels=frame_pixels)
        self.notice = _renamed(self._strategy.check_tokens(mode))
        image = min(self.shape.image_tokens(settings.workload.max_pixels), longest_tokens)
        limit = run.image_limit or image
        if run.auto_tokens and limit < image:
            raise PlanError(
                f"workload.max_pixels: an image may have {image:,} tokens, and a rank has room for {limit:,} in "
                f"{mode}; use train.activation_checkpointing=auto (or true), a lower workload.max_pixels, or "
                "more or larger devices")
        self.first = self.place(nodes)
        most = self.first.limits.most_tokens
        if longest_tokens > most * cluster.num_ranks:
            raise PlanError(
                f"workload: the longest sequence has {longest_tokens:,} tokens, and the cluster holds at most "
                f"{most * cluster.num_ranks:,} in one ({most:,} on each of {cluster.num_ranks} ranks, in {mode}); "
                "allowed: a smaller workload.max_tokens, more ranks, "
                "train.activation_checkpointing=auto (or packs) or train.activation_offload=auto")

    def holds(self, num_ranks: int, num_tokens: int) -> bool:
        """Whether this many ranks together hold a sequence of `num_tokens` tokens."""
        return self.place(self._nodes(num_ranks)).limits.most_tokens * num_ranks >= num_tokens

    def _as_measured(self, origin: Origin | None) -> dict[str, Any]:
        """What such ranks have in common with those that a cost was measured on, if their device is described so."""
        cluster, name = self.settings.cluster, str(origin.device["name"]) if origin else ""
        if origin and (cluster.kind == "cpu" or described(CONF / "device", name) == self.device):
            return {"device_names": (name,), "fused": origin.settings.get("fused_operators", True)}
        return {"device_names": (str(self.device.matches[0]),)}

    def _nodes(self, num_ranks: int) -> tuple[int, ...]:
        return tuple(rank // self.settings.cluster.ranks_per_node for rank in range(num_ranks))

    def _ranks(self, nodes: tuple[int, ...]) -> Ranks:
        cluster, names = self.settings.cluster, tuple(map(str, nodes))
        return Ranks(kind=cluster.kind, shape=self.shape, memory_bytes=int(self.memory_bytes), nodes=names,
                     node_memory_bytes=dict.fromkeys(names, cluster.node_memory_gib * 2**30),
                     **self._devices)

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


NAMES = {"planner.cost": "cluster.cost", "planner.sync": "sync", "planner.tokens_per_rank": "train.tokens_per_rank",
         "cluster.num_workers": "cluster.num_ranks", "elastic.": "faults.", f", {MEASURE}, or nothing": ", or nothing"}
"""What a run's errors say, and what is said of a simulation instead."""


def _renamed(text: str) -> str:
    for name, here in NAMES.items():
        text = text.replace(name, here)
    return text


def _config(settings: Simulation, longest_tokens: int, origin: Origin | None) -> Config:
    config, train, faults = Config(), settings.train, settings.faults
    threads = origin.device.get("threads", 1) if origin else 1
    return replace(
        config, model=replace(config.model, preset=settings.model),
        data=replace(config.data, max_pixels=settings.workload.max_pixels),
        cluster=replace(config.cluster, num_workers=settings.cluster.num_ranks, cpus_per_worker=threads),
        batch=replace(config.batch, global_samples=settings.global_samples),
        planner=replace(config.planner, sync=settings.sync, cost=settings.cluster.cost,
                        tokens_per_rank=train.tokens_per_rank, max_sequence_tokens=longest_tokens),
        train=replace(config.train, precision=train.precision, freeze=train.freeze,
                      activation_checkpointing=train.activation_checkpointing,
                      activation_offload=train.activation_offload, expert_parallel=train.expert_parallel),
        elastic=replace(config.elastic, mirror_every_steps="0" if faults.policy == "restart"
                        else faults.mirror_every_steps))
